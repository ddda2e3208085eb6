"""A loss of NeMo-RL that takes logits, computes entropies from them, and chooses the tokens that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...distributed import vocab_parallel_logprob_entropy
from ...tokens import TokenRule
from ...vocabulary import logprob_entropy
from .._assumptions import require
from .._hook_options import HookOptions
from .._megatron import Ranks, of_megatron
from .._options import check_options
from .table import NEMO_RL


class D3SLoss:
    """A policy loss of NeMo-RL, with the gradient of the chosen tokens alone.

    NeMo-RL gives it logits, since its ``input_type`` is ``LOGIT``. One pass over them gives exact entropies, and the
    log-probabilities that NeMo-RL's loss is called with. Loss and metrics are those of all tokens; a dropped token has
    gradient 0. Ray pickles this object for the workers.

    Args:
        loss_fn: a loss of NeMo-RL that takes log-probabilities, such as ``ClippedPGLossFn``.
        policy: NeMo-RL's ``config.policy``.
        token_ratio, token_rule, token_scope, drop_zeros: as ``ratio``, ``rule``, ``scope`` and ``drop_zeros`` of
            :func:`d3s_kernels.select_tokens`.
        token_pool: what scope "batch" pools: a "micro_batch", or those of all "data_parallel" ranks.

    Raises:
        ValueError: a bad option, or a policy or loss whose tokens cannot be chosen.
        RuntimeError: the installed NeMo-RL differs from what is assumed.
    """

    def __init__(
        self,
        loss_fn: Any,
        policy: Mapping[str, Any],
        *,
        token_ratio: float = 0.2,
        token_rule: TokenRule = "advantage_entropy",
        token_scope: Literal["batch", "sequence"] = "batch",
        drop_zeros: bool = False,
        token_pool: Literal["data_parallel", "micro_batch"] = "micro_batch",
    ) -> None:
        require(NEMO_RL, "D3SLoss")
        check_options({"token_ratio": token_ratio})
        given = {"token_rule": token_rule, "token_scope": token_scope, "token_pool": token_pool}
        options = HookOptions.from_values({**given, "drop_zeros": drop_zeros}, "")
        self._megatron = bool((policy.get("megatron_cfg") or {}).get("enabled", False))
        _require_run(loss_fn, policy, self._megatron, token_rule, token_pool)
        self._loss_fn, self._packed = loss_fn, policy["sequence_packing"]["enabled"]
        self._choose = partial(options.chosen_tokens, ratio=token_ratio)
        self._pool = _Pool(self._choose, storage=None)
        self.input_type = type(loss_fn.input_type).LOGIT
        by_tokens = loss_fn.metric_normalizations["approx_entropy"]
        ours = {"d3s/entropy": by_tokens, "d3s/token_share": by_tokens}
        self.metric_normalizations = loss_fn.metric_normalizations | ours

    def __getattr__(self, name: str) -> Any:
        """What else NeMo-RL reads of its loss, such as ``loss_type``."""
        if name.startswith("_"):  # also while an object without attributes is unpickled
            raise AttributeError(name)
        return getattr(self._loss_fn, name)

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, logits: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """NeMo-RL's loss and metrics of a micro-batch, or of one sequence of a packed one.

        Args:
            data: ``input_ids``, ``token_mask``, ``advantages`` ``[B, S]``, ``sample_mask`` ``[B]``; what NeMo-RL reads.
            global_valid_seqs, global_valid_toks: numbers of all ranks and micro-batches, 0-d.
            logits: ``[B, at least S, V]``, divided by the temperature: all columns, or a DTensor with ``Shard(-1)``, or
                the columns of a rank of Megatron.

        Returns:
            The loss, and its metrics with ``d3s/entropy``, the mean over all tokens in nats, and ``d3s/token_share``,
            which is not known for packed sequences. As in NeMo-RL, the sum over micro-batches is the metric.
        """
        logprobs, entropies = self._scores(logits, data["input_ids"])
        entropies = entropies.detach()
        mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()
        sums = {"d3s/entropy": torch.where(mask, entropies, 0.0).sum()}
        if logprobs.requires_grad:
            pool, place = self._add((entropies, data["advantages"][:, 1:], mask), logits)
            logprobs.register_hook(lambda gradient: torch.where(pool.kept[place], gradient, 0.0))  # type: ignore[no-untyped-call]
            if not self._packed:
                sums["d3s/token_share"] = pool.kept[place].sum()
        valid = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        loss, metrics = self._loss_fn(next_token_logprobs=logprobs, data=data, **valid)
        tokens = max(float(global_valid_toks), 1.0)
        return loss, metrics | {name: total.item() / tokens for name, total in sums.items()}

    def _scores(self, logits: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the tokens after the first, float32 ``[B, S - 1]``."""
        labels = input_ids[:, 1:].to(logits.device)
        logits = logits[:, : labels.shape[1]]  # Megatron pads sequences
        if isinstance(logits, DTensor):
            return vocab_parallel_logprob_entropy(logits, labels)
        ranks = _ranks_of_megatron() if self._megatron else None
        if ranks is None or ranks.tensor_parallel is None:
            return logprob_entropy(logits, labels)
        start = ranks.tensor_rank * logits.shape[-1]
        return vocab_parallel_logprob_entropy(logits, labels, start, ranks.tensor_parallel)

    def _add(self, tokens: _Tokens, logits: Tensor) -> tuple[_Pool, int]:
        """Adds tokens to the pool of their micro-batch, and returns it with their place in it."""
        # The logits of packed sequences are views of one tensor.
        storage = (logits.to_local() if isinstance(logits, DTensor) else logits).untyped_storage().data_ptr()
        if not (self._packed and self._pool.storage == storage):
            group = _ranks_of_megatron().data_parallel if self._megatron else dist.group.WORLD
            self._pool = _Pool(partial(self._choose, data_parallel=group), storage)
        self._pool.tokens.append(tokens)
        return self._pool, len(self._pool.tokens) - 1


_Tokens: TypeAlias = tuple[Tensor, Tensor, Tensor]  # entropies, advantages and mask, [B, T]


class _Pool:
    """The tokens of a micro-batch, among which those to keep are chosen.

    NeMo-RL calls its loss for one of the packed sequences after the other. Therefore the choice is made in the backward
    pass, where all of them are known: the gradient of the first one asks for it.
    """

    def __init__(self, choose: Callable[..., Tensor], storage: int | None) -> None:
        self.storage = storage
        self.tokens: list[_Tokens] = []
        self._choose = choose

    @cached_property
    def kept(self) -> list[Tensor]:
        """bool ``[B, T]`` for each of the tokens added; no more can be added then."""
        self.storage = None
        masks = [mask for *_, mask in self.tokens]
        lengths = [length for sequences, length in (mask.shape for mask in masks) for _ in range(sequences)]
        offsets = torch.tensor([0, *lengths], device=masks[0].device).cumsum(0)
        flat = [torch.cat([part.flatten() for part in parts]) for parts in zip(*self.tokens, strict=True)]
        kept = self._choose(*flat[:2], mask=flat[2], offsets=offsets)
        parts = torch.split(kept, [mask.numel() for mask in masks])
        return [part.view_as(mask) for part, mask in zip(parts, masks, strict=True)]


def _ranks_of_megatron() -> Ranks:
    require(NEMO_RL, "D3SLoss_on_Megatron")  # Megatron is in the workers' environment alone
    return of_megatron()


def _require_run(loss_fn: Any, policy: Mapping[str, Any], megatron: bool, rule: str, pool: str) -> None:
    """Raises a ValueError for a run whose tokens cannot be chosen; the message names the option."""
    section = policy["megatron_cfg" if megatron else "dtensor_cfg"]
    alone = section["tensor_model_parallel_size" if megatron else "tensor_parallel_size"] == 1
    pooled = alone or megatron  # NeMo-RL does not pass the group of DTensor's data-parallel ranks
    kind, fused = loss_fn.input_type.name, getattr(loss_fn, "use_fused_linear_logprobs", False)
    fuse_loss, cut = policy["sequence_packing"].get("fuse_loss", False), section["context_parallel_size"]
    top_k, top_p = policy["generation"]["top_k"], policy["generation"]["top_p"]
    for name, given, takes, fits in (
        ("loss_fn.input_type", kind, "LOGPROB", kind == "LOGPROB"),
        ("use_fused_linear_logprobs", fused, "false, because it leaves no logits", not fused),
        ("sequence_packing.fuse_loss", fuse_loss, "false, because a fused loss gets no logits", not fuse_loss),
        ("generation.top_k", top_k, "null, because entropies are of all tokens", top_k is None or top_k <= 0),
        ("generation.top_p", top_p, "1.0, because entropies are of all tokens", top_p in (None, 1)),
        ("context_parallel_size", cut, "1, because a rank has parts of sequences", cut == 1),
        ("token_rule", rule, "another with tensor parallelism: ranks would draw others", alone or rule != "random"),
        ("token_pool", pool, "'micro_batch' with DTensor's tensor parallelism", pool == "micro_batch" or pooled),
    ):
        if not fits:
            raise ValueError(f"{name}: got {given!r}; takes {takes}")
