"""Computes verl's fused LM head with :func:`d3s_kernels.linear_logprob_entropy`, if
``fused_kernel_options.impl_backend`` is ``d3s``. For verl's top-k distillation loss (:mod:`.distillation`), computes it
with :func:`d3s_kernels.linear_token_logprobs`.

verl's models with fused kernels pass hidden states and the head's weight to the class ``FusedLinearForPPO``. The
plug-in replaces this class, the functions that build a model with this class, and the functions that prepare the
model's micro-batches. Our function for the inputs of a micro-batch tells our head which positions will be read, and
over which supports their log-probabilities are computed. Our head computes only these positions.
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

from ..._lm_head.from_model import read_head
from ..._lm_head.own_logits import UnsupportedHead, UntriedHead, verified_head
from ...logprobs.logprob_entropy import linear_logprob_entropy
from ...logprobs.token_logprobs import linear_token_logprobs
from ...support.sampling_mask import SamplingMask
from .._head_options import LogitsDtype, dtype_of_logits
from .checks import head_options
from .distillation import NAME as DISTILLATION
from .distillation import Teacher, joined, teacher_of, with_losses
from .replaced import Replaced
from .sampling_mask import NOTE, flat_responses, places_of_responses, response_lengths, sampling_mask_of

BACKEND = "d3s"
OPTION = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
_POLICY_UPDATE = ("response_mask", "old_log_probs", "advantages")


@dataclass
class Read:
    """Tells which positions of a micro-batch will be read, and over which supports their log-probabilities are
    computed.
    """

    mask: Tensor | None = None  # bool: which rows of this process's hidden states are read; None: all rows
    at_most: int | None = None  # an upper bound on the number of rows that are read; None: no bound is known
    supports: SamplingMask | None = None
    in_loss_and_old: tuple[Tensor, Tensor] | None = None
    """Set only in a policy update. For each packed position: whether the position is in the loss, and its old
    log-probability.
    """
    teacher: Teacher | None = None  # the ids of a top-k distillation loss, for the rows of the mask
    logits_dtype: LogitsDtype = "float32"  # the option
    used: bool = False  # whether our head has computed the micro-batch


_READ: ContextVar[Read | None] = ContextVar("what is read of this micro-batch", default=None)


def _fused_kernel_options(engine: Any) -> Any:
    return getattr(getattr(engine, "model_config", None), "fused_kernel_options", None) or {}


def _asked_for(engine: Any) -> bool:
    """Returns whether the engine's configuration asks for our head."""
    return bool(_fused_kernel_options(engine).get("impl_backend") == BACKEND)


def _serves(engine: Any, data: Any) -> bool:
    """Returns whether our head computes the micro-batch."""
    return _asked_for(engine) and bool(tu.get_non_tensor_data(data, "use_fused_kernels", False))


def _read_positions(engine: Any, data: Any, labels: Tensor) -> Read:
    """Returns which positions of the model's next output will be read.

    A policy update reads the tokens that ``response_mask`` marks. A pass without gradients reads all response tokens
    except the tokens of padding rows. Any other loss may read all positions. A caller that asks for the model's output
    may also read all positions. ``labels`` has the labels of this process, followed by padding.
    """
    field = tu.get_non_tensor_data(data, NOTE, None)
    if field is not None and engine.use_ulysses_sp:
        raise ValueError(f"ulysses_sequence_parallel_size: got more than 1 with {NOTE}; takes 1")
    if field is not None and tu.get_non_tensor_data(data, DISTILLATION, False):
        raise ValueError(f"{DISTILLATION}: got True with {NOTE}; takes False, since a teacher has no supports")
    in_loss = torch.is_grad_enabled() and all(name in data for name in _POLICY_UPDATE)
    everything = "responses" not in data or "response_mask" not in data or (torch.is_grad_enabled() and not in_loss)
    if field is None and (everything or tu.get_non_tensor_data(data, "return_model_output", False)):
        return Read()

    read = flat_responses(data, data["response_mask"]).bool()  # one value for each token of all responses
    if not in_loss:
        lengths = response_lengths(data)
        row = torch.arange(len(lengths), device=read.device).repeat_interleave(lengths, output_size=len(read))
        # The response mask of verl's padding rows is all 0.
        is_real = torch.zeros_like(lengths).index_add(0, row, read.to(lengths.dtype)) > 0
        read = is_real[row]
    packed, offsets = tu.get_non_tensor_data(data, "use_remove_padding", True), data["input_ids"].offsets()
    width = None if packed else int(offsets.diff().max())
    total, places = len(data["input_ids"].values()), places_of_responses(data)
    in_loss_and_old = None
    if in_loss:
        old = flat_responses(data, data["old_log_probs"])
        in_loss_and_old = _at(total, places, read), _at(total, places, old)
    if width is None:
        mask = _of_this_rank(_at(total, places, read), len(labels), engine)
    else:
        mask = _at(width * (len(offsets) - 1), places_of_responses(data, width), read)
    supports = None
    if field is not None:
        supports = sampling_mask_of(data, field, width=width)[0]
        padding = len(mask) + 1 - len(supports.offsets)  # the number of unread rows at the end, which get no support
        offsets = torch.cat([supports.offsets, supports.offsets[-1:].expand(padding)])
        supports = SamplingMask(supports.token_ids, offsets)
    return Read(mask, None if in_loss else min(len(read), len(mask)), supports, in_loss_and_old)


def _at(rows: int, places: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(rows).index_copy(0, places, values)


def _of_this_rank(values: Tensor, rows: int, engine: Any) -> Tensor:
    """Returns this rank's part of the values. verl pads the packed sequence, and splits it evenly over the ranks."""
    ranks = engine.ulysses_sequence_parallel_size if engine.use_ulysses_sp else 1
    whole = torch.cat([values, values.new_zeros(ranks * rows - len(values), *values.shape[1:])])
    return whole.view(ranks, rows, *values.shape[1:])[get_ulysses_sequence_parallel_rank() if ranks > 1 else 0]


class FusedLinearForPPO(torch_functional.FusedLinearForPPO):  # type: ignore[misc]  # verl has no types
    """verl's class of this name, but it also accepts ``impl_backend="d3s"``."""

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
        read = _READ.get() or Read()
        read.used = True
        hidden, weight = hidden_states.to(dtype), vocab_weights.to(dtype)
        options: dict[str, Any] = {
            "temperature": temperature, "mask": None if read.mask is None else read.mask.view(input_ids.shape),
            "max_rows": read.at_most, "logits_dtype": dtype_of_logits(read.logits_dtype, dtype),
        }  # fmt: skip
        if read.teacher is not None:
            ids = read.teacher.token_ids.view(*input_ids.shape, -1)
            return joined(linear_token_logprobs(hidden, weight, ids, input_ids, **options))
        return linear_logprob_entropy(hidden, weight, input_ids, sampling_mask=read.supports, **options)


def _require_plain_head(model: Any) -> None:
    """verl passes only hidden states and one weight to the head. Raises a ValueError if the model's logits depend on
    more than these.

    If there are several ranks, verl has loaded the weights on only one rank. That rank runs the model, and compares the
    model's logits with the logits that our head would have. The other ranks check only the model's configuration.
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


def _patch_forward_with_backends(
    original: Any, model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """verl's function of this name, but it also accepts the name of our back-end."""
    if not use_fused_kernels or fused_kernels_backend != BACKEND:
        original(model, use_fused_kernels, fused_kernels_backend)
        return
    _require_plain_head(model)
    original(model, use_fused_kernels, "torch")  # the next line sets the back-end that the forward uses
    model._verl_fused_kernels_backend = BACKEND
    print(f"d3s_kernels: the fused LM head of {type(model).__name__} is ours, not verl's torch back-end")


def _select_fsdp2_wrap_targets(original: Any, model: Any, fsdp_transformer_layer_cls_to_wrap: Any) -> list[Any]:
    """Keeps the head in the FSDP2 group of the root module. FSDP2 gathers a module's weights when the module is called,
    but the head module is never called.
    """
    modules: list[Any] = original(model, fsdp_transformer_layer_cls_to_wrap)
    if getattr(model, "_verl_fused_kernels_backend", None) != BACKEND:
        return modules
    return [module for module in modules if module is not model.lm_head]


def _prepare_model_inputs(original: Any, engine: Any, micro_batch: Any) -> Any:
    """Prepares the inputs as verl does, and stores which positions of the model's output will be read."""
    _READ.set(None)
    ours = _serves(engine, micro_batch)
    options = head_options(_fused_kernel_options(engine), ours)
    inputs, output_args = original(engine, micro_batch)
    if ours:
        labels = output_args["input_ids_rmpad_rolled"]
        read = _read_positions(engine, micro_batch, labels)
        read.teacher = teacher_of(
            micro_batch, lambda values: _of_this_rank(values, len(labels), engine), f"{OPTION}={BACKEND}"
        )
        read.logits_dtype = options.logits_dtype
        _READ.set(read)
    return inputs, output_args


def _prepare_model_outputs(
    original: Any, engine: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> Any:
    """Prepares the outputs as verl does, but tokens outside the loss get their old log-probabilities, so that the
    importance ratio of these tokens is 1.
    """
    read = _READ.get()
    _READ.set(None)
    ours = _serves(engine, micro_batch)
    if not ours and tu.get_non_tensor_data(micro_batch, NOTE, None) is not None:
        raise ValueError(
            f"{NOTE}: got a micro-batch with it; takes actor_rollout_ref.model.use_fused_kernels=true and "
            f"{OPTION}={BACKEND}, since only our LM head takes supports"
        )
    if not ours:
        return original(engine, output, output_args, micro_batch, logits_processor_func)
    if read is None or not read.used:
        raise RuntimeError(
            f"{OPTION}: got {BACKEND!r}, but the model has not called this head; takes an engine whose model verl's "
            "patch_forward_with_backends has patched (FSDP)"
        )
    if read.teacher is not None:
        output = with_losses(output, read.teacher, read.mask, logits_processor_func)
    outputs = original(engine, output, output_args, micro_batch, logits_processor_func)
    if read.in_loss_and_old is None or "log_probs" not in outputs:
        return outputs
    in_loss, old = read.in_loss_and_old
    values = outputs["log_probs"].values()
    values = torch.where(in_loss, values, old.to(values.dtype))
    return outputs | {"log_probs": torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())}


def _build_lora_module(original: Any, engine: Any, module: Any) -> Any:
    """Adds adapters as verl does, but refuses an adapter on the head."""
    adapted = original(engine, module)
    if _asked_for(engine):
        try:
            read_head(adapted)
        except UnsupportedHead as error:
            raise ValueError(f"{OPTION}: got {BACKEND!r}. {error}") from error
    return adapted


REPLACED = (
    Replaced(FSDPEngineWithLMHead, "prepare_model_inputs", ["self", "micro_batch"], _prepare_model_inputs),
    Replaced(
        FSDPEngineWithLMHead, "prepare_model_outputs",
        ["self", "output", "output_args", "micro_batch", "logits_processor_func"], _prepare_model_outputs,
    ),
    Replaced(FSDPEngineWithLMHead, "_build_lora_module", ["self", "module"], _build_lora_module),
    Replaced(
        monkey_patch, "patch_forward_with_backends", ["model", "use_fused_kernels", "fused_kernels_backend"],
        _patch_forward_with_backends,
    ),
    Replaced(
        fsdp_utils, "_select_fsdp2_wrap_targets", ["model", "fsdp_transformer_layer_cls_to_wrap"],
        _select_fsdp2_wrap_targets,
    ),
    Replaced(torch_functional, "FusedLinearForPPO", ["chunk_size", "impl_backend"], FusedLinearForPPO),
)  # fmt: skip
