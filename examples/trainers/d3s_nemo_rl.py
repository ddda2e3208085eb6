"""NeMo-RL: its policy is trained on the rollouts that D3S keeps, and its loss on their chosen tokens.

Copy this file to a folder on the PYTHONPATH, add d3s_kernels to NeMo-RL's ``pyproject.toml``, since workers have
environments of their own, and change a copy of its ``examples/run_grpo.py``. Each change is useful alone. The
signatures were read at 7ea279a, 2026-08-22::

    options = {"rollouts_start": 8, "rollouts_end": 8, "token_ratio_start": 0.2, "token_ratio_end": 0.2}

    setup(..., policy_factory=policy_class(Policy, config.grpo.num_generations_per_prompt, **options))

    loss_fn = D3SLoss(config.loss_fn, config.policy, **options, loss_denominator="all")  # after setup(...)

With Megatron, this loss can do without logits. Copy ``d3s_nemo_rl_head.py`` too, and put ``with_head(...)`` around the
policy's class: ``policy_factory=with_head(Policy)``, or ``with_head(policy_class(...))``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.loss.interfaces import LossInputType, MetricNormalizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

import d3s_kernels as d3s
from d3s_kernels.distributed import vocab_parallel_logprob_entropy
from d3s_kernels.integrations.megatron import shard_logprob_entropy

WORKER = "d3s_nemo_rl_head.D3SMegatronPolicyWorker"


def require(fits: bool, name: str, given: Any, takes: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {given!r}; takes {takes}")


def policy_class(base: type, group_size: int, **options: Any) -> type:
    """NeMo-RL's class of policies, with an update that gets the rollouts of :func:`keep_rollouts`."""

    class D3SPolicy(base):
        def train(self, data: Any, *args: Any, **named: Any) -> Any:
            kept = keep_rollouts(data, group_size, self.cfg["train_global_batch_size"], **options)
            return super().train(kept, *args, **named)

    return D3SPolicy


def with_head(policy: type) -> Callable[..., Any]:
    """A factory of policies whose Megatron workers make no logits in an update with :class:`D3SLoss`."""
    environments = import_module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    environments[WORKER] = environments["nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"]
    return partial(policy, worker_extension_cls_fqn=WORKER)


def keep_rollouts(data: Any, group_size: int, multiple_of: int, **options: Any) -> Any:
    """The kept rows of a batch of whole groups, with the advantages that they have, by options of ``d3s.Selection``.

    ``multiple_of`` is the rows of a step; the number of kept rows is rounded up to a multiple of it. ValueError: a bad
    option; rows that are no whole groups or steps; advantages that differ within a rollout.
    """
    selection, rows = d3s.Selection(**options), len(data["advantages"])
    start, end, source = (getattr(selection.options, n) for n in ("rollouts_start", "rollouts_end", "advantages_from"))
    require(start == end, "rollouts_end", end, f"rollouts_start, which is {start}: steps have a fixed size")
    require(source == "all", "advantages_from", source, "'all', because NeMo-RL has computed them")
    for name, size in (("group_size", group_size), ("multiple_of", multiple_of)):
        require(size > 0 and rows % size == 0, name, size, f"a divisor of {rows}, the rows")
    of_tokens, mask = data["advantages"], (data["token_mask"] * data["sample_mask"].unsqueeze(-1)).bool()
    advantages = of_tokens.gather(1, mask.int().argmax(dim=1, keepdim=True))  # that of the first token in the mask
    same = not ((of_tokens != advantages) & mask).any()
    require(same, "advantages", "different ones for the tokens of a rollout", "one for each rollout")
    advantages, has_tokens = advantages.view(-1, group_size), mask.any(dim=1).view(-1, group_size)
    kept = selection.rollouts(advantages, 0.0, has_tokens=has_tokens, multiple_of=multiple_of)
    return data.select_indices(kept.flatten().nonzero().flatten())


class D3SLoss(ClippedPGLossFn):
    """NeMo-RL's loss, with the gradient of the chosen tokens alone. Its value and its metrics cover all tokens.

    One pass over the logits, or with :func:`with_head` over the hidden states, gives exact entropies and
    log-probabilities. Tokens are chosen from a rank's micro-batch.

    Args:
        config, policy: NeMo-RL's ``config.loss_fn`` and ``config.policy``.
        options: of :class:`d3s_kernels.Selection`.

    Raises:
        ValueError: a bad option, or a policy whose tokens cannot be chosen.
    """

    input_type = LossInputType.LOGIT

    def __init__(self, config: Any, policy: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config)
        self.selection = d3s.Selection(**options)
        self.megatron = bool((policy.get("megatron_cfg") or {}).get("enabled", False))
        given, section = self.selection.options, policy["megatron_cfg" if self.megatron else "dtensor_cfg"]
        start, end, drawn = given.token_ratio_start, given.token_ratio_end, given.token_rule == "random"
        context, (top_k, top_p) = section["context_parallel_size"], map(policy["generation"].get, ("top_k", "top_p"))
        alone = section["tensor_model_parallel_size" if self.megatron else "tensor_parallel_size"] * context == 1
        rule, packed, cuts = given.off_policy_rule, policy["sequence_packing"]["enabled"], self.selection.cuts
        apart = not packed or (given.token_scope == "sequence" and rule != "m2po")
        fused = section.get("use_fused_linear_logprobs", False) or policy["sequence_packing"].get("fuse_loss", False)
        for name in ("use_importance_sampling_correction", "force_on_policy_ratio"):
            require(rule == "none" or not getattr(config, name), name, True, "false with off_policy_rule")
        require(start == end, "token_ratio_end", end, f"token_ratio_start, {start}, since a loss is not told of steps")
        require(given.loss_denominator == "all", "loss_denominator", "kept", "'all', which NeMo-RL divides by")
        require(not given.drop_shared_tokens, "drop_shared_tokens", True, "false: a rank may have parts of groups")
        require(apart, "sequence_packing.enabled", True, "false, or token_scope 'sequence'")
        require(not fused, "use_fused_linear_logprobs, fuse_loss", True, "false: they give a loss no logits")
        require((top_k or 0) <= 0 and top_p in (None, 1), "generation.top_k and top_p", (top_k, top_p), "null and 1.0")
        require(context == 1 or self.megatron, "context_parallel_size", context, "1 without Megatron")
        require(alone or not (drawn or cuts), "token_rule", given.token_rule, "another with such parallelism")
        self.of_logits = {"temperature": policy["generation"].get("temperature", 1.0)}
        self.of_logits["logits_dtype"] = getattr(torch, policy["precision"])  # as NeMo-RL rounds the old ones
        self.head: Any = None
        self.hidden: Any = None  # a micro-batch's hidden states, the weight and the number of rows
        self.metric_normalizations |= dict.fromkeys(("d3s/entropy", "d3s/token_share"), MetricNormalizer.TOKENS)

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, logits: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """NeMo-RL's loss and metrics, with ``d3s/entropy``, the mean in nats, and ``d3s/token_share``.

        ``logits`` are ``[B, at least S, V]``, divided by the temperature: all columns, a DTensor with ``Shard(-1)``, or
        the columns of a rank of Megatron, and there only the rows of a rank of its context. In :meth:`reading`, they
        have no columns.
        """
        labels = data["input_ids"][:, 1:].to(logits.device)
        mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()
        if self.megatron:
            logprobs, entropies = self.scores_of_megatron(logits, labels, mask)
            # A row outside the mask counts nowhere, and its ratio should be 1 rather than infinite.
            logprobs = torch.where(mask, logprobs, data["prev_logprobs"][:, 1:] if "prev_logprobs" in data else 0.0)
        else:
            scores = vocab_parallel_logprob_entropy if isinstance(logits, DTensor) else d3s.logprob_entropy
            logprobs, entropies = scores(logits[:, : labels.shape[1]], labels)
        sums = {"d3s/entropy": torch.where(mask, entropies.detach(), 0.0).sum()}
        if logprobs.requires_grad:
            names = ("prev_logprobs", "generation_logprobs", "advantages")
            old, sampled, advantages = (data.get(name, mask)[:, -mask.shape[1] :] for name in names)
            trusted = self.selection.trusted(old, sampled, advantages, mask=mask)
            kept, _, _, _, weight = self.selection.tokens(entropies, advantages, 0.0, mask=trusted)
            weight = trusted.weight if weight is None else trusted.weight * weight
            logprobs.register_hook(lambda gradient: torch.where(kept, gradient * weight, 0.0))
            sums["d3s/token_share"] = kept.sum()
        loss, metrics = super().__call__(logprobs, data, global_valid_seqs, global_valid_toks)
        return loss, metrics | {name: total.item() / max(float(global_valid_toks), 1.0) for name, total in sums.items()}

    def scores_of_megatron(self, logits: Tensor, labels: Tensor, mask: Tensor) -> list[Tensor]:
        """Log-probabilities and entropies ``[B, S - 1]``, 0 outside the mask."""
        mpu = import_module("megatron.core.parallel_state")
        context, rows, width = mpu.get_context_parallel_world_size(), logits.shape[1], labels.shape[1]
        labels, mask = (pad(values, (0, rows * context - width)) for values in (labels, mask))  # as Megatron's rows
        if context > 1:
            nemo, rank = import_module("nemo_rl.distributed.model_utils"), mpu.get_context_parallel_rank()
            labels, mask = (nemo._get_tokens_on_this_cp_rank(values, rank, context) for values in (labels, mask))
        if self.head is None:
            ranks = mpu.get_tensor_model_parallel_rank() * logits.shape[-1], mpu.get_tensor_model_parallel_group()
            scores = vocab_parallel_logprob_entropy(logits, labels, *ranks, mask=mask)
        else:  # NeMo-RL calls a loss with one packed sequence after the other
            hidden, weight, number = self.hidden
            around = self.begin, number - self.begin - rows
            labels, mask = (pad(values, around) for values in (labels, mask))
            shard = {name: getattr(self.head.layer, name) for name in ("tp_group", "sequence_parallel", "bias")}
            scores = shard_logprob_entropy(hidden, weight, labels, mask=mask, **shard, **self.of_logits)
            scores = [values[:, self.begin : self.begin + rows] for values in scores]
            self.begin += rows
        scores = [scores[0], scores[1].detach()]
        if context > 1:
            scores = [nemo.allgather_cp_sharded_tensor(v, mpu.get_context_parallel_group(), 1) for v in scores]
        return [values[:, :width] for values in scores]

    @contextmanager
    def reading(self, head: Any, model: torch.nn.Module) -> Iterator[None]:
        """Inside, ``model`` gives no logits, and this loss reads its hidden states. ``head`` is an ``LMHead`` of it."""
        layer = head.layer  # None on pipeline stages without a loss

        def keep(_: Any, given: tuple[Tensor], named: dict[str, Any]) -> None:
            parts = layer.tp_group.size() if layer.sequence_parallel else 1
            weight = layer.weight if named["weight"] is None else named["weight"]  # of a tied embedding
            self.hidden, self.begin = (given[0], weight, parts * len(given[0])), 0

        def cover(_: Any, __: Any, output: Tensor) -> Tensor:
            return output.new_empty(self.hidden[0].shape[1], self.hidden[2], 0)  # LMHead's check returns a few rows

        hooks = [] if layer is None else [layer.register_forward_pre_hook(keep, with_kwargs=True)]
        hooks += [] if layer is None else [model.register_forward_hook(cover)]
        self.head = head
        try:
            with head:
                yield
        finally:
            self.head = self.hidden = None
            for hook in hooks:
                hook.remove()
