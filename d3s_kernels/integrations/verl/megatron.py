"""Computes the fused LM head of verl's Megatron engine with our op for a vocabulary that ranks share, if
``fused_kernel_options.impl_backend`` is ``d3s``.

verl's engine hands the last hidden states, the head's weight and the labels to ``linear_cross_entropy``, for all packed
positions of this rank. The plug-in replaces this function, and the gather of hidden states before it. Which positions
will be read is known for whole sequences, before verl packs them and divides them among the ranks. So when verl packs
the labels, the same function packs the places of the positions that are read.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from verl.models.mcore import model_forward_fused
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngine,
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from ..._lm_head.own_logits import UnsupportedHead, text_of
from ...support.sampling_mask import SamplingMask
from .._head_options import HeadOptions
from ..megatron.checks import require_known, require_shard, require_version, with_output_layer
from ..megatron.shard import shard_logprob_entropy
from .checks import head_options
from .distillation import NAME as DISTILLATION
from .positions import (
    BACKEND,
    OPTION,
    Positions,
    asked_for,
    fused_kernel_options,
    positions_read,
    require_no_supports,
    with_empty_rows,
    with_old,
)
from .replaced import Replaced


@dataclass
class _Read:
    """A micro-batch that our head computes."""

    places: Any  # nested: for each token, 1 + the place of the position that predicts it; 0: it is not read
    positions: Positions | None  # in the order of the tokens of the micro-batch; None: all are read
    vocab_size: int
    options: HeadOptions
    packed_places: Tensor | None = None  # as verl packs them for this rank
    labels: Tensor | None = None  # the labels beside them
    sequence_parallel: bool = False  # whether a rank has only its part of the hidden states
    used: bool = False  # whether our head has computed the micro-batch


_READ: ContextVar[_Read | None] = ContextVar("the micro-batch that our head computes", default=None)


def _read_of(data: Any, engine: Any, options: HeadOptions) -> _Read:
    positions, ids = positions_read(data), data["input_ids"]
    places = torch.arange(1, len(ids.values()) + 1, device=ids.device)
    if positions is not None:  # a token is predicted by the position before it
        places = torch.where(positions.mask.roll(1), places - 1, 0)
    nested = torch.nested.nested_tensor_from_jagged(places, ids.offsets())
    vocab_size = text_of(engine.model_config.hf_config).vocab_size
    return _Read(nested, positions, vocab_size, options)


def _prepare_model_inputs(original: Any, engine: Any, batch: Any) -> Any:
    """Prepares the inputs as verl does, and stores which positions of the model's output will be read."""
    inputs = original(engine, batch)
    if isinstance(engine, MegatronEngineWithValueHead):
        return inputs
    ours = asked_for(engine) and bool(engine.engine_config.use_fused_kernels)
    options = head_options(fused_kernel_options(engine), ours)
    if not ours:
        require_no_supports(batch)
        return inputs
    if tu.get_non_tensor_data(batch, DISTILLATION, False):
        raise ValueError(f"{DISTILLATION}: got True; takes False with strategy=megatron and {OPTION}={BACKEND}")
    _READ.set(_read_of(batch, engine, options))
    return inputs


def _forward_step(
    original: Any, engine: Any, batch_iter: Any, model: Any, logits_processor_func: Any,
    postprocess_micro_batch_func: Any,
) -> Any:  # fmt: skip
    """Forwards a micro-batch as verl does, but tokens outside the loss get their old log-probabilities."""
    _READ.set(None)
    try:
        output, loss_function = original(engine, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)
        read = _READ.get()
    finally:
        _READ.set(None)
    if read is None or not unwrap_model(model).post_process:
        return output, loss_function
    if not read.used:
        raise RuntimeError(
            f"{OPTION}: got {BACKEND!r}, but the model has not called this head; takes a model that verl's "
            "patch_fused_forward has patched"
        )
    if read.positions is not None:
        output = with_old(output, read.places.offsets(), read.positions.in_loss_and_old)
    return output, loss_function


def _preprocess_thd_engine(original: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Packs a micro-batch as verl does. Beside the labels, which verl shifts by one (``need_roll``), it packs the
    places.
    """
    packed = original(input_ids, *args, **kwargs)
    read = _READ.get()
    if read is not None and kwargs.get("need_roll"):
        read.labels, read.packed_places = packed[0], original(read.places, *args, **kwargs)[0]
    return packed


def _gather_from_sequence_parallel_region(original: Any, input_: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Our head gathers hidden states itself, so for our head this function leaves them as they are."""
    read = _READ.get()
    if read is None:
        theirs: Tensor = original(input_, *args, **kwargs)
        return theirs
    read.sequence_parallel = True
    return input_


def _linear_cross_entropy(original: Any, *args: Any, **kwargs: Any) -> Any:
    read = _READ.get()
    return original(*args, **kwargs) if read is None else _scores(read, *args, **kwargs)


def _scores(
    read: _Read, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str, group: Any
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies, with the arguments of verl's ``linear_cross_entropy``. They are 0 at
    positions that are not read.
    """
    places, packed = read.packed_places, read.labels
    if places is None or packed is None or labels.shape != packed.shape or labels.data_ptr() != packed.data_ptr():
        raise ValueError(
            f"labels: got shape {list(labels.shape)} in the model's head; takes the labels as verl packs them for this "
            f"rank: {OPTION}={BACKEND} takes no model that divides or copies them"
        )
    read.used = True
    supports: SamplingMask | None = None
    if read.positions is not None and read.positions.supports is not None:
        last = read.positions.supports.rows  # where an empty support is added, for positions that are not read
        rows = torch.where(places > 0, places - 1, last).flatten()
        supports = with_empty_rows(read.positions.supports, last + 1).index_select(rows)
    scores: tuple[Tensor, Tensor] = shard_logprob_entropy(
        hidden, weight, labels, tp_group=group, sequence_parallel=read.sequence_parallel, vocab_size=read.vocab_size,
        mask=places > 0, temperature=temperature, sampling_mask=supports,
        **read.options.head_arguments(hidden.dtype),
    )  # fmt: skip
    return scores


def _maybe_enable_fused_kernels(original: Any, engine: Any) -> None:
    """Patches the model as verl does. verl turns its fused kernels off without an error where it has none; our head is
    refused there.
    """
    wanted = asked_for(engine) and engine.engine_config.use_fused_kernels and not engine.is_value_model
    original(engine)
    if not wanted:
        return
    if not engine.engine_config.use_fused_kernels:
        raise ValueError(
            f"{OPTION}: got {BACKEND!r}, but verl has turned its fused kernels off; with strategy=megatron takes "
            "megatron.use_remove_padding=true and model.mtp.enable=false"
        )
    if engine.engine_config.dynamic_context_parallel:
        raise ValueError(f"megatron.dynamic_context_parallel: got True; takes False with {OPTION}={BACKEND}")
    for model in engine.module:
        try:
            _require_plain_layer(with_output_layer(unwrap_model(model)))
        except UnsupportedHead as error:
            raise ValueError(f"{OPTION}: got {BACKEND!r}. {error}") from error
    print("d3s_kernels: the fused LM head of the Megatron engine is ours, not verl's linear_cross_entropy")


def _require_plain_layer(model: Any) -> None:
    """verl passes only the weight of the output layer to the head, and never calls the layer. Raises an UnsupportedHead
    if logits depend on more than the weight, or if the layer has to be called.
    """
    require_version()
    layer = getattr(model, "output_layer", None)
    if layer is None:  # another pipeline stage
        return
    require_known(model, layer)
    name = f"output_layer: got a {type(layer).__name__}"
    changed = "forward" in vars(layer) or type(layer).forward is not ColumnParallelLinear.forward
    if changed or type(model)._postprocess is not GPTModel._postprocess:
        raise UnsupportedHead(f"{name} in a {type(model).__name__}, with code of its own; takes those of Megatron-Core")
    if layer.bias is not None:
        raise UnsupportedHead(f"{name} with a bias; takes one without")
    tied = layer.weight is None
    require_shard(layer, model.shared_embedding_or_output_weight() if tied else layer.weight)
    if layer._forward_hooks or (layer._forward_pre_hooks and not tied):  # the hooks of a tied embedding have run
        raise UnsupportedHead(
            f"{name} with hooks, which would not run; takes one without, and overlap_param_gather=false in "
            "megatron.override_ddp_config"
        )


REPLACED = (
    Replaced(
        MegatronEngineWithLMHead, "forward_step",
        ["self", "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"], _forward_step,
    ),
    Replaced(MegatronEngineWithLMHead, "prepare_model_inputs", ["self", "batch"], _prepare_model_inputs),
    Replaced(MegatronEngine, "_maybe_enable_fused_kernels", ["self"], _maybe_enable_fused_kernels),
    Replaced(
        model_forward_fused, "preprocess_thd_engine", ["input_ids", "pre_process", "need_roll"],
        _preprocess_thd_engine, passes_the_rest_on=True,
    ),
    Replaced(
        model_forward_fused, "gather_from_sequence_parallel_region", ["input_"],
        _gather_from_sequence_parallel_region, passes_the_rest_on=True,
    ),
    Replaced(model_forward_fused, "linear_cross_entropy", ["args", "kwargs"], _linear_cross_entropy),
)  # fmt: skip
