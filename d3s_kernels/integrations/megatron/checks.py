"""Refuses models whose logits the head would not compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..._lm_head.from_model import why_not_here
from ..._lm_head.own_logits import UnsupportedHead
from .._versions import untested

_OF_LAYER = ("weight", "bias", "skip_bias_add", "output_size", "sequence_parallel", "tp_group")
_NOT_SERVED = ("mtp_num_layers", "defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm")


def require_version() -> None:
    import megatron.core

    if (wrong := untested("megatron-core", megatron.core.__version__, "0.15", "0.17", "tests/megatron")) is not None:
        raise ImportError(wrong)


def with_output_layer(model: Any) -> Any:
    """Returns the module that calls the output layer."""
    while hasattr(model, "module"):
        model = model.module
    inner = getattr(model, "language_model", model)
    if not hasattr(inner, "post_process"):
        raise UnsupportedHead(
            f"LMHead: got a {type(model).__name__}; takes a GPTModel of Megatron-Core, or a model with it as "
            "language_model; of several model chunks, the one with the output layer"
        )
    return inner


def require_known(model: Any, layer: Any) -> None:
    """Refuses what the model and its configuration show before a call."""
    name = type(layer).__name__
    if missing := [each for each in _OF_LAYER if not hasattr(layer, each)]:
        raise UnsupportedHead(
            f"LMHead: got an output layer {name} without {', '.join(missing)}; takes a ColumnParallelLinear. Leave it "
            "out of an adapter's target modules (LoRA), since the adapter would never be trained"
        )
    own = {id(layer.weight), id(layer.bias)}
    if more := [each for each, value in layer.named_parameters() if value.requires_grad and id(value) not in own]:
        raise UnsupportedHead(f"LMHead: got an output layer {name} whose {', '.join(more)} would never be trained")
    if layer.bias is not None and layer.skip_bias_add:
        raise UnsupportedHead(f"LMHead: got a {name} with skip_bias_add, so that the model's logits leave out its bias")
    for option in _NOT_SERVED:
        if value := getattr(model.config, option, None):
            raise UnsupportedHead(f"LMHead: got a model with {option}={value}; takes one without")


def require_shard(layer: Any, weight: Tensor) -> None:
    """Refuses a weight that is not this rank's rows, or that cannot be read."""
    ranks, reason = layer.tp_group.size(), why_not_here(SimpleNamespace(weight=weight))
    if reason is None and type(weight) not in (Tensor, Parameter):
        reason = f"a {type(weight).__name__} as weight, maybe quantised; takes a Parameter"
    if reason is None and len(weight) * ranks != layer.output_size:
        reason = (
            f"a weight of {len(weight)} rows on each of {ranks} tensor-parallel ranks; takes this rank's rows of the "
            f"{layer.output_size} ids"
        )
    if reason is not None:
        raise UnsupportedHead(f"LMHead: got a {type(layer).__name__} with {reason}")
