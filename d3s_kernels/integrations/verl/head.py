"""verl's fused LM head on :func:`d3s_kernels.linear_logprob_entropy`: ``fused_kernel_options.impl_backend=d3s``.

verl's models with fused kernels hand hidden states and the head's weight to ``FusedLinearForPPO``. Importing this
module replaces that class by one that knows our name, and lets ``patch_forward_with_backends`` take it. The engine
(:mod:`.engine`) says which positions of a micro-batch are read; the others are not computed.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.models.transformers import monkey_patch
from verl.utils import tensordict_utils as tu
from verl.utils.experimental import torch_functional
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank

from ...sampling import SamplingMask
from ...vocabulary import linear_logprob_entropy
from .sampling_mask import NOTE, flat_responses, places_of_responses, response_lengths, sampling_mask_of

BACKEND = "d3s"
OPTION = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
_POLICY_UPDATE = ("response_mask", "old_log_probs", "advantages")
_CHANGES_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "output_multiplier": 1.0}


class Read(NamedTuple):
    """What is read of a micro-batch's log-probabilities."""

    mask: Tensor
    """bool, for each row of the hidden states of this process."""
    at_most: int | None
    """How many rows of the mask are true at most, as far as the host knows."""
    sets: SamplingMask | None
    constant: tuple[Tensor, Tensor] | None
    """In an update: for each packed position whether it is in the loss, and the old log-probability."""


_READ: ContextVar[Read | None] = ContextVar("what is read of this micro-batch", default=None)


def serves(engine: Any, data: Any) -> bool:
    """Whether the micro-batch goes through our head."""
    options = getattr(getattr(engine, "model_config", None), "fused_kernel_options", None) or {}
    ours: bool = options.get("impl_backend") == BACKEND and tu.get_non_tensor_data(data, "use_fused_kernels", False)
    return ours


def read_positions(engine: Any, data: Any, labels: Tensor) -> None:
    """Says what will be read of the model's next output.

    In an update these are the tokens of ``response_mask``, which the losses read. Elsewhere they are all tokens of the
    responses, except in rows of padding.

    Args:
        engine: verl's engine.
        data: the micro-batch, as the engine gets it.
        labels: those of this process, with the padding behind them: ``output_args["input_ids_rmpad_rolled"]``.
    """
    if tu.get_non_tensor_data(data, "distillation_use_topk", False):
        raise ValueError(f"distillation_use_topk: got True; takes False with {OPTION}={BACKEND}, which has no logits")
    if "responses" not in data or "response_mask" not in data:  # no trainer of policies: everything is read
        _READ.set(None)
        return
    packed, field = tu.get_non_tensor_data(data, "use_remove_padding", True), tu.get_non_tensor_data(data, NOTE, None)
    offsets = data["input_ids"].offsets()
    width = None if packed else int(offsets.diff().max())
    read, in_loss = _tokens_read(data)
    total, places = len(data["input_ids"].values()), places_of_responses(data)
    constant = None
    if in_loss:
        old = flat_responses(data, data["old_log_probs"])
        constant = _at(total, places, read), _at(total, places, old)
    rows = total if width is None else width * (len(offsets) - 1)
    mask = _at(rows, places if width is None else places_of_responses(data, width), read)
    sets = None
    if field is not None:
        sets, _ = sampling_mask_of(data, field, width=width)
        mask, sets = _padded(mask, sets, len(labels) if packed else rows)
    elif packed:
        mask = _of_this_rank(mask, len(labels), engine)
    _READ.set(Read(mask, None if in_loss else min(len(read), len(mask)), sets, constant))


def _tokens_read(data: Any) -> tuple[Tensor, bool]:
    """For each token of all responses whether it is read, and whether this is because a loss reads it."""
    counts, lengths = flat_responses(data, data["response_mask"]).bool(), response_lengths(data)
    if torch.is_grad_enabled() and all(name in data for name in _POLICY_UPDATE):
        return counts, True
    row = torch.arange(len(lengths), device=counts.device).repeat_interleave(lengths, output_size=len(counts))
    counting = torch.zeros_like(lengths).index_add(0, row, counts.to(lengths.dtype)) > 0  # rows of padding do not
    return counting[row], False


def _at(rows: int, places: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(rows).index_copy(0, places, values)


def _padded(mask: Tensor, sets: SamplingMask, rows: int) -> tuple[Tensor, SamplingMask]:
    """With rows behind that are not read. (With sets there is no sequence parallelism.)"""
    more = rows - len(mask)
    offsets = torch.cat([sets.offsets, sets.offsets[-1:].expand(more)])
    return torch.cat([mask, mask.new_zeros(more)]), SamplingMask(sets.token_ids, offsets)


def _of_this_rank(mask: Tensor, rows: int, engine: Any) -> Tensor:
    """The part of this rank: verl pads the packed sequence and divides it evenly."""
    ranks = engine.ulysses_sequence_parallel_size if engine.use_ulysses_sp else 1
    whole = torch.cat([mask, mask.new_zeros(ranks * rows - len(mask))])
    return whole.view(ranks, rows)[get_ulysses_sequence_parallel_rank() if ranks > 1 else 0]


def with_old_log_probs(found: dict[str, Any], data: Any) -> dict[str, Any]:
    """The engine's outputs, with the old log-probabilities at the positions that no loss reads: a ratio of 1 there."""
    read = _READ.get()
    _READ.set(None)
    if read is None or read.constant is None:
        return found
    in_loss, old = read.constant
    values = found["log_probs"].values()
    values = torch.where(in_loss, values, old.to(values.dtype))
    return found | {"log_probs": torch.nested.nested_tensor_from_jagged(values, data["input_ids"].offsets())}


class FusedLinearForPPO(torch_functional.FusedLinearForPPO):  # type: ignore[misc]  # verl has no types
    """verl's class, which also takes ``impl_backend="d3s"``."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        self.ours = impl_backend == BACKEND
        super().__init__(chunk_size, "torch" if self.ours else impl_backend)

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if not self.ours:
            theirs: tuple[Tensor, Tensor] = super().forward(hidden_states, vocab_weights, input_ids, temperature)
            return theirs
        if isinstance(vocab_weights, DTensor):
            raise ValueError(f"lm_head.weight: got a DTensor; {OPTION}={BACKEND} takes a whole weight in each process")
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        given: dict[str, Any] = {}
        if (read := _READ.get()) is not None:
            given = {"mask": read.mask.view(input_ids.shape), "max_rows": read.at_most, "sampling_mask": read.sets}
        return linear_logprob_entropy(
            hidden_states.to(dtype), vocab_weights.to(dtype), input_ids, temperature=temperature, **given
        )


def _require_plain_head(model: Any) -> None:
    """Raises where a model makes its logits of more than hidden states and a weight: verl hands on nothing else."""
    name, head = type(model).__name__, getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "weight"):
        raise ValueError(f"{OPTION}: got {BACKEND!r} for {name}, which has no lm_head.weight; takes a language model")
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"{OPTION}: got {BACKEND!r} for {name}, whose lm_head has a bias; takes one without")
    config = model.config.get_text_config()
    for key, plain in _CHANGES_LOGITS.items():
        if (value := getattr(config, key, plain)) not in (None, plain):
            raise ValueError(f"{OPTION}: got {BACKEND!r} for {name} with {key}={value}; takes a model without")


def _wrap() -> None:
    original = monkey_patch.patch_forward_with_backends
    takes = ["model", "use_fused_kernels", "fused_kernels_backend"]
    if (parameters := list(inspect.signature(original).parameters)) != takes:
        raise RuntimeError(f"verl's patch_forward_with_backends takes {parameters}; expected {takes}, as in verl 0.9.1")

    @functools.wraps(original)
    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        if not use_fused_kernels or fused_kernels_backend != BACKEND:
            original(model, use_fused_kernels, fused_kernels_backend)
            return
        _require_plain_head(model)
        original(model, use_fused_kernels, "torch")  # its forward makes the class below with the name that follows
        model._verl_fused_kernels_backend = BACKEND

    monkey_patch.patch_forward_with_backends = patch_forward_with_backends
    torch_functional.FusedLinearForPPO = FusedLinearForPPO


_wrap()
