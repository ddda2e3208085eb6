"""verl's fused LM head on :func:`d3s_kernels.linear_logprob_entropy`: ``fused_kernel_options.impl_backend=d3s``.

verl's models with fused kernels hand hidden states and the head's weight to ``FusedLinearForPPO``. The plug-in replaces
that class by one that accepts this back-end, and makes ``patch_forward_with_backends`` accept it too. The wrapper of
``prepare_model_inputs`` of verl's FSDP engine tells our head which positions of a micro-batch are read, and over which
sets; the head computes no others. The wrapper of ``prepare_model_outputs`` gives the others their old
log-probabilities. The wrapper of ``_build_lora_module`` refuses an adapter on the head.
"""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.models.transformers import monkey_patch
from verl.utils import fsdp_utils
from verl.utils import tensordict_utils as tu
from verl.utils.experimental import torch_functional
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ..._own_logits import UnsupportedHead, UntriedHead, verified_head
from ...heads import read_head
from ...sampling import SamplingMask
from ...vocabulary import linear_logprob_entropy
from .replaced import Replaced
from .sampling_mask import NOTE, flat_responses, places_of_responses, response_lengths, sampling_mask_of

BACKEND = "d3s"
OPTION = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
_POLICY_UPDATE = ("response_mask", "old_log_probs", "advantages")


@dataclass
class Read:
    """Which log-probabilities of a micro-batch are read."""

    mask: Tensor | None = None
    """bool, one for each row of this process's hidden states: whether it is read. None: all are read."""
    at_most: int | None = None
    """The host's upper bound on the rows where the mask is True; None if it has no bound."""
    sets: SamplingMask | None = None
    in_loss_and_old: tuple[Tensor, Tensor] | None = None
    """In an update, for each packed position: whether it is in the loss, and its old log-probability."""
    used: bool = False
    """Whether our head has computed the micro-batch."""


_READ: ContextVar[Read | None] = ContextVar("what is read of this micro-batch", default=None)


def _forget() -> None:
    """Clears what is stored about the last micro-batch."""
    _READ.set(None)


def _asked_for(engine: Any) -> bool:
    """Whether the engine's configuration asks for our head."""
    options = getattr(getattr(engine, "model_config", None), "fused_kernel_options", None) or {}
    return bool(options.get("impl_backend") == BACKEND)


def _serves(engine: Any, data: Any) -> bool:
    """Whether the micro-batch goes through our head."""
    return _asked_for(engine) and bool(tu.get_non_tensor_data(data, "use_fused_kernels", False))


def _read_positions(engine: Any, data: Any, labels: Tensor) -> None:
    """Stores which positions of the model's next output will be read.

    In a policy update these are the tokens of ``response_mask``; without gradients, all response tokens except in
    padding rows. Any other loss, and a caller that asks for the model's output, may read all positions.

    Args:
        engine: verl's engine.
        data: the micro-batch, as the engine gets it.
        labels: this process's labels, then padding: ``output_args["input_ids_rmpad_rolled"]``.
    """
    if tu.get_non_tensor_data(data, "distillation_use_topk", False):
        raise ValueError(f"distillation_use_topk: got True; takes False with {OPTION}={BACKEND}, which has no logits")
    field = tu.get_non_tensor_data(data, NOTE, None)
    if field is not None and engine.use_ulysses_sp:
        raise ValueError(f"ulysses_sequence_parallel_size: got more than 1 with {NOTE}; takes 1")
    in_loss = torch.is_grad_enabled() and all(name in data for name in _POLICY_UPDATE)
    everything = "responses" not in data or "response_mask" not in data or (torch.is_grad_enabled() and not in_loss)
    if field is None and (everything or tu.get_non_tensor_data(data, "return_model_output", False)):
        _READ.set(Read())
        return
    packed, offsets = tu.get_non_tensor_data(data, "use_remove_padding", True), data["input_ids"].offsets()
    width = None if packed else int(offsets.diff().max())
    read = _tokens_read(data, in_loss)
    total, places = len(data["input_ids"].values()), places_of_responses(data)
    in_loss_and_old = None
    if in_loss:
        old = flat_responses(data, data["old_log_probs"])
        in_loss_and_old = _at(total, places, read), _at(total, places, old)
    rows = total if width is None else width * (len(offsets) - 1)
    mask = _at(rows, places if width is None else places_of_responses(data, width), read)
    if packed:
        mask = _of_this_rank(mask, len(labels), engine)
    sets = None if field is None else _of_rows(sampling_mask_of(data, field, width=width)[0], len(mask))
    _READ.set(Read(mask, None if in_loss else min(len(read), len(mask)), sets, in_loss_and_old))


def _tokens_read(data: Any, in_loss: bool) -> Tensor:
    """bool, one for each token of all responses: whether it is read."""
    counts, lengths = flat_responses(data, data["response_mask"]).bool(), response_lengths(data)
    if in_loss:
        return counts
    row = torch.arange(len(lengths), device=counts.device).repeat_interleave(lengths, output_size=len(counts))
    counting = torch.zeros_like(lengths).index_add(0, row, counts.to(lengths.dtype)) > 0  # False for padding rows
    return counting[row]


def _at(rows: int, places: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(rows).index_copy(0, places, values)


def _of_rows(sets: SamplingMask, rows: int) -> SamplingMask:
    """Appends empty spans for padding rows, which are not read. (There is no sequence parallelism with sets.)"""
    more = rows + 1 - len(sets.offsets)
    return SamplingMask(sets.token_ids, torch.cat([sets.offsets, sets.offsets[-1:].expand(more)]))


def _of_this_rank(mask: Tensor, rows: int, engine: Any) -> Tensor:
    """This rank's part of the mask: verl pads the packed sequence and splits it evenly."""
    ranks = engine.ulysses_sequence_parallel_size if engine.use_ulysses_sp else 1
    whole = torch.cat([mask, mask.new_zeros(ranks * rows - len(mask))])
    return whole.view(ranks, rows)[get_ulysses_sequence_parallel_rank() if ranks > 1 else 0]


def _at_old_log_probs(found: dict[str, Any], data: Any) -> dict[str, Any]:
    """The engine's outputs. Tokens outside the loss get their old log-probabilities, so that their ratio is 1."""
    read = _READ.get()
    if read is None or not read.used:
        raise RuntimeError(
            f"{OPTION}: got {BACKEND!r}, but the model has not called this head; takes an engine whose model verl's "
            "patch_forward_with_backends has patched (FSDP)"
        )
    if read.in_loss_and_old is None or "log_probs" not in found:
        return found
    in_loss, old = read.in_loss_and_old
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
            raise ValueError(
                f"lm_head.weight: got a DTensor; {OPTION}={BACKEND} takes the whole weight, as FSDP gathers it with "
                "the model's root, and no tensor parallelism"
            )
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        given: dict[str, Any] = {}
        if (read := _READ.get()) is not None:
            read.used = True
            if read.mask is not None:
                given = {"mask": read.mask.view(input_ids.shape), "max_rows": read.at_most, "sampling_mask": read.sets}
        return linear_logprob_entropy(
            hidden_states.to(dtype), vocab_weights.to(dtype), input_ids, temperature=temperature, **given
        )


def _require_plain_head(model: Any) -> None:
    """Raises if a model computes its logits from more than hidden states and a weight: verl passes on nothing else.

    On several ranks, verl has loaded the weights on only one, which runs the model. The others read its configuration.
    """
    name = type(model).__name__
    refused = f"{OPTION}: got {BACKEND!r} for {name}"
    try:
        head = read_head(model)
        if head.layer is not getattr(model, "lm_head", None):
            raise ValueError(f"{refused}, which has no lm_head.weight; takes a language model")
        if getattr(head.layer, "bias", None) is not None:
            raise ValueError(f"{refused}, whose lm_head has a bias; takes one without")
        if head.scale != 1 or head.softcap is not None:
            raise ValueError(
                f"{refused}, whose logits have the scale {head.scale:.6g} and the soft cap {head.softcap}; takes a "
                "model without"
            )
        if not any(parameter.is_meta for parameter in model.parameters()):
            verified_head(head)
    except UntriedHead as error:
        warnings.warn(f"{OPTION}: {BACKEND!r} goes by the configuration of {name} alone. {error}", stacklevel=2)
    except UnsupportedHead as error:
        raise ValueError(f"{refused}. {error}") from error


def _with_our_backend(original: Any) -> Any:
    """verl's ``patch_forward_with_backends``, which also takes our back-end's name."""

    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        if not use_fused_kernels or fused_kernels_backend != BACKEND:
            original(model, use_fused_kernels, fused_kernels_backend)
            return
        _require_plain_head(model)
        original(model, use_fused_kernels, "torch")  # its forward makes the class above, with the next line's name
        model._verl_fused_kernels_backend = BACKEND
        print(f"d3s_kernels: the fused LM head of {type(model).__name__} is ours, not verl's torch back-end")

    return patch_forward_with_backends


def _without_the_head(original: Any) -> Any:
    """Keeps the head in the root's FSDP2 group: FSDP2 gathers a module when it is called, and the head never is."""

    def select_fsdp2_wrap_targets(model: Any, fsdp_transformer_layer_cls_to_wrap: Any) -> list[Any]:
        found: list[Any] = original(model, fsdp_transformer_layer_cls_to_wrap)
        ours = getattr(model, "_verl_fused_kernels_backend", None) == BACKEND
        return [module for module in found if module is not model.lm_head] if ours else found

    return select_fsdp2_wrap_targets


def _with_read_positions(original: Any) -> Any:
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        _forget()
        inputs, output_args = original(self, micro_batch)
        if _serves(self, micro_batch):
            _read_positions(self, micro_batch, output_args["input_ids_rmpad_rolled"])
        return inputs, output_args

    return prepare_model_inputs


def _with_old_log_probs(original: Any) -> Any:
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        try:
            ours = _serves(self, micro_batch)
            if not ours and tu.get_non_tensor_data(micro_batch, NOTE, None) is not None:
                raise ValueError(
                    f"{NOTE}: got a micro-batch with it; takes actor_rollout_ref.model.use_fused_kernels=true and "
                    f"{OPTION}={BACKEND}, since only our LM head takes sets"
                )
            found = original(self, output, output_args, micro_batch, logits_processor_func)
            return _at_old_log_probs(found, micro_batch) if ours else found
        finally:
            _forget()

    return prepare_model_outputs


def _with_a_plain_head(original: Any) -> Any:
    def build_lora_module(self: Any, module: Any) -> Any:
        adapted = original(self, module)
        if _asked_for(self):
            try:
                read_head(adapted)
            except UnsupportedHead as error:
                raise ValueError(f"{OPTION}: got {BACKEND!r}. {error}") from error
        return adapted

    return build_lora_module


REPLACED = (
    Replaced(FSDPEngineWithLMHead, "prepare_model_inputs", ["self", "micro_batch"], _with_read_positions),
    Replaced(
        FSDPEngineWithLMHead, "prepare_model_outputs",
        ["self", "output", "output_args", "micro_batch", "logits_processor_func"], _with_old_log_probs,
    ),
    Replaced(FSDPEngineWithLMHead, "_build_lora_module", ["self", "module"], _with_a_plain_head),
    Replaced(
        monkey_patch, "patch_forward_with_backends", ["model", "use_fused_kernels", "fused_kernels_backend"],
        _with_our_backend,
    ),
    Replaced(
        fsdp_utils, "_select_fsdp2_wrap_targets", ["model", "fsdp_transformer_layer_cls_to_wrap"], _without_the_head
    ),
    Replaced(torch_functional, "FusedLinearForPPO", ["chunk_size", "impl_backend"], lambda original: FusedLinearForPPO),
)  # fmt: skip
