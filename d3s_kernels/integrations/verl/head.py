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
from dataclasses import dataclass, field
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

from ..._lm_head.from_model import model_arguments, read_head
from ..._lm_head.own_logits import ModelHead, UnsupportedHead, UntriedHead, verified_head
from ...logprobs.logprob_entropy import linear_logprob_entropy
from ...logprobs.token_logprobs import linear_token_logprobs
from ...support.sampling_mask import SamplingMask
from .._head_options import HeadOptions
from .checks import head_options
from .distillation import Teacher, joined, teacher_of, with_losses
from .positions import (
    BACKEND,
    OPTION,
    asked_for,
    fused_kernel_options,
    positions_read,
    require_no_supports,
    with_empty_rows,
    with_old,
)
from .replaced import Replaced


@dataclass
class Read:
    """Tells which positions of a micro-batch will be read, and over which supports their log-probabilities are
    computed.
    """

    mask: Tensor | None = None  # bool: which rows of this process's hidden states are read; None: all rows
    at_most: int | None = None  # an upper bound on the number of rows that are read; None: no bound is known
    supports: SamplingMask | None = None
    in_loss_and_old: tuple[Tensor, Tensor] | None = None  # as in Positions
    teacher: Teacher | None = None  # the ids of a top-k distillation loss, for the rows of the mask
    options: HeadOptions = field(default_factory=HeadOptions)
    used: bool = False  # whether our head has computed the micro-batch


_READ: ContextVar[Read | None] = ContextVar("what is read of this micro-batch", default=None)


def _serves(engine: Any, data: Any) -> bool:
    """Returns whether our head computes the micro-batch."""
    return asked_for(engine) and bool(tu.get_non_tensor_data(data, "use_fused_kernels", False))


def _read_positions(engine: Any, data: Any, labels: Tensor) -> Read:
    """Returns which positions of the model's next output will be read. ``labels`` has the labels of this process,
    followed by padding.
    """
    packed = tu.get_non_tensor_data(data, "use_remove_padding", True)
    found = positions_read(data, None if packed else int(data["input_ids"].offsets().diff().max()))
    if found is None:
        return Read()
    mask, supports = found.mask, found.supports
    if packed:
        mask = _of_this_rank(mask, len(labels), engine)
    if supports is not None:
        supports = with_empty_rows(supports, _ranks(engine) * len(mask))
        if engine.use_ulysses_sp:
            first = get_ulysses_sequence_parallel_rank() * len(mask)
            supports = supports.index_select(torch.arange(first, first + len(mask), device=mask.device))
    at_most = None if found.at_most is None else min(found.at_most, len(mask))
    return Read(mask, at_most, supports, found.in_loss_and_old)


def _ranks(engine: Any) -> int:
    """Returns the number of ranks among which verl divides the positions of a micro-batch."""
    return engine.ulysses_sequence_parallel_size if engine.use_ulysses_sp else 1


def _of_this_rank(values: Tensor, rows: int, engine: Any) -> Tensor:
    """Returns this rank's part of the values. verl pads the packed sequence, and splits it evenly over the ranks."""
    ranks = _ranks(engine)
    whole = torch.cat([values, values.new_zeros(ranks * rows - len(values), *values.shape[1:])])
    return whole.view(ranks, rows, *values.shape[1:])[get_ulysses_sequence_parallel_rank() if ranks > 1 else 0]


class _Ours(str):
    """The name of our back-end. A model passes it to its fused head, which finds in it what verl passes to no fused
    head: the head's bias, and the scale and the soft cap of the logits.
    """

    head: ModelHead


class FusedLinearForPPO(torch_functional.FusedLinearForPPO):  # type: ignore[misc]  # verl has no types
    """verl's class of this name, but it also accepts ``impl_backend="d3s"``."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        self.ours = impl_backend == BACKEND
        self.head: ModelHead | None = getattr(impl_backend, "head", None)
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
        model = {"temperature": temperature} if self.head is None else _beside_weight(self.head, temperature, dtype)
        options: dict[str, Any] = model | {
            "mask": None if read.mask is None else read.mask.view(input_ids.shape),
            "max_rows": read.at_most, **read.options.head_arguments(dtype),
        }  # fmt: skip
        if read.teacher is not None:
            ids = read.teacher.token_ids.view(*input_ids.shape, -1)
            return joined(linear_token_logprobs(hidden, weight, ids, input_ids, **options))
        return linear_logprob_entropy(hidden, weight, input_ids, sampling_mask=read.supports, **options)


def _beside_weight(head: ModelHead, temperature: float, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of our head that a model has besides its weight."""
    arguments: dict[str, Any] = {**model_arguments(head, temperature)}
    del arguments["weight"]
    bias = arguments["bias"]
    return arguments | {"bias": None if bias is None else bias.to(dtype)}


def _require_head(model: Any) -> ModelHead:
    """verl passes only hidden states and one weight to the head. Returns all that the model's logits depend on. Raises
    a ValueError if they depend on more than a weight, a bias, a scale and a soft cap.

    If there are several ranks, verl has loaded the weights on only one rank. That rank runs the model, and compares the
    model's logits with the logits that our head would have. The other ranks check only the model's configuration. So a
    model that does not follow its configuration is refused.
    """
    name = type(model).__name__
    refused = f"{OPTION}: got {BACKEND!r} for {name}"
    try:
        head = read_head(model)
        if head.layer is not getattr(model, "lm_head", None):
            raise ValueError(f"{refused}, which has no lm_head.weight; takes a language model")
        if not any(parameter.is_meta for parameter in model.parameters()):
            found = verified_head(head)
            if found != head:
                raise ValueError(
                    f"{refused}, whose logits have the scale {found.scale:.6g} and the soft cap {found.softcap}, while "
                    f"its configuration says {head.scale:.6g} and {head.softcap}; takes a model that follows its "
                    "configuration"
                )
    except UntriedHead as error:
        warnings.warn(f"{OPTION}: {BACKEND!r} goes by the configuration of {name} alone. {error}", stacklevel=2)
    except UnsupportedHead as error:
        raise ValueError(f"{refused}. {error}") from error
    return head


def _patch_forward_with_backends(
    original: Any, model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """verl's function of this name, but it also accepts the name of our back-end."""
    if not use_fused_kernels or fused_kernels_backend != BACKEND:
        original(model, use_fused_kernels, fused_kernels_backend)
        return
    ours = _Ours(BACKEND)
    ours.head = _require_head(model)
    original(model, use_fused_kernels, "torch")  # the next line sets the back-end that the forward uses
    model._verl_fused_kernels_backend = ours
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
    options = head_options(fused_kernel_options(engine), ours)
    inputs, output_args = original(engine, micro_batch)
    if ours:
        labels = output_args["input_ids_rmpad_rolled"]
        read = _read_positions(engine, micro_batch, labels)
        read.teacher = teacher_of(
            micro_batch, lambda values: _of_this_rank(values, len(labels), engine), f"{OPTION}={BACKEND}"
        )
        read.options = options
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
    if not ours:
        require_no_supports(micro_batch)
        return original(engine, output, output_args, micro_batch, logits_processor_func)
    if read is None or not read.used:
        raise RuntimeError(
            f"{OPTION}: got {BACKEND!r}, but the model has not called this head; takes an engine whose model verl's "
            "patch_forward_with_backends has patched (FSDP)"
        )
    if read.teacher is not None:
        output = with_losses(output, read.teacher, read.mask, logits_processor_func)
    outputs = original(engine, output, output_args, micro_batch, logits_processor_func)
    return with_old(outputs, micro_batch["input_ids"].offsets(), read.in_loss_and_old)


def _build_lora_module(original: Any, engine: Any, module: Any) -> Any:
    """Adds adapters as verl does, but refuses an adapter on the head."""
    adapted = original(engine, module)
    if asked_for(engine):
        try:
            head = read_head(adapted)
        except UnsupportedHead as error:
            raise ValueError(f"{OPTION}: got {BACKEND!r}. {error}") from error
        ours = getattr(head.model, "_verl_fused_kernels_backend", None)
        if isinstance(ours, _Ours):
            ours.head = head  # PEFT may have put another layer in the head's place
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
