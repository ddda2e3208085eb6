"""Replaces TRL's fused LM head by :func:`d3s_kernels.linear_logprob_entropy`.

TRL passes the hidden states of labelled positions to one function, which this module replaces. Our function stores no
logits, and its backward computes only the rows with a non-zero gradient. TRL still does everything else, such as MoE,
PEFT, FSDP and VLMs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import trl.trainer.utils as trl_utils
from accelerate import DistributedType
from torch import Tensor

from ..._arguments.bundles import NumberOrTensor
from ..._dispatch import ops
from ..._dispatch.backends import DEVICES
from ..._lm_head import op
from ..._lm_head.forward import HostNumber
from ..._lm_head.from_model import read_head, why_not_here
from ..._lm_head.op import AtBackward
from ..._lm_head.own_logits import ModelHead, UnsupportedHead, UntriedHead, require_own_logits
from ..._lm_head.problem import HeadProblem
from ...support.sampling_mask import SamplingMask, supports_of
from .._head_options import HeadOptions

_TRLS_HEAD = trl_utils._ChunkedLogProbFunction
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_said: set[str] = set()


def check_head(model: Any) -> None:
    """Checks that the logits of TRL's head are the model's own logits. Does nothing if our op cannot read the head's
    weight. Warns if the check cannot run the model on a few tokens.

    Raises:
        UnsupportedHead: the head has an adapter or other parameters, which TRL's head and ours would ignore (trl#4612);
            or the model's own logits differ from the logits of TRL's head.
    """
    head = read_head(model)
    if why_not_here(head.layer) is None:
        try:
            require_own_logits(head)
        except UntriedHead as error:
            warnings.warn(f"d3s_kernels: TRL's reading of the model's head is not verified. {error}", stacklevel=3)


@dataclass(eq=False)
class RowsWithGradient:
    """The number of rows that have a gradient. It is known only after the forward; until then it is None."""

    number: HostNumber | None = None


@dataclass(eq=False)
class OurHead:
    """Our LM head. It replaces TRL's ``ChunkedLogProbFunction`` during one forward of a model."""

    model_head: ModelHead | None = None  # the scored model's head, to check TRL's scale and cap; None: no check
    adds_to_gradients: bool = False  # whether the backward may add to ``weight.grad`` directly
    kept: RowsWithGradient = field(default_factory=RowsWithGradient)
    sets: tuple[Tensor, Tensor] | None = None  # the sets of one forward's tokens, and the mask of labelled tokens
    options: HeadOptions = field(default_factory=HeadOptions)  # TRL's own head rounds logits as "auto" does

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy",),
    ) -> tuple[Tensor | None, ...]:
        """Computes log-probabilities and entropies, with the arguments and the results of TRL's function."""
        if self.model_head is not None:
            require_same_logits(self.model_head, logit_scale, final_logit_softcapping)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        reason = why_not(hidden, weight, dtype, logit_scale, outputs)
        if reason is not None:
            if self.sets is not None:
                raise RuntimeError(
                    f"sampling_mask: got True: the LM head cannot be ours, because {reason}; and TRL's is over the "
                    "whole vocabulary"
                )
            if _TRLS_HEAD is None:
                raise RuntimeError(f"d3s_kernels: the LM head cannot be ours, because {reason}; and TRL's needs Triton")
            say_that_trls_head_is_used(reason)
            theirs: tuple[Tensor | None, ...] = _TRLS_HEAD.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
            return theirs
        bias = None if bias is None else bias.to(dtype)
        temperature, cap = without_scale(logit_scale, temperature, final_logit_softcapping)
        sets = None
        if self.sets is not None:  # selects the labelled tokens' sets without a host sync: their number is len(targets)
            places, _ = ops.compact(self.sets[1], len(targets))
            sets = SamplingMask.from_padded(self.sets[0].index_select(0, places.clamp(min=0)))
        problem = HeadProblem(
            hidden.to(dtype), weight.to(dtype), targets, bias, NumberOrTensor(temperature), cap,
            supports=supports_of(sets, None if sets is None else 0, hidden), **self.options.head_arguments(dtype),
        )  # fmt: skip
        at_backward = None if torch.compiler.is_compiling() else self._at_backward(weight, dtype)
        logprob, entropy = op.linear_logprob_entropy(problem, at_backward)
        return logprob, entropy if "entropy" in outputs else None, None, None, None

    def _at_backward(self, weight: Tensor, dtype: torch.dtype) -> AtBackward:
        """Returns the hooks for a backward whose matrix products have the dtype ``dtype``. The hooks may hold a
        reference to a parameter, but never to a gathered weight.
        """
        parameter = weight if self.adds_to_gradients and weight.is_leaf else None
        return AtBackward(
            lambda: None if parameter is None else _gradient_to_add_to(parameter, dtype),
            lambda: None if self.kept.number is None else self.kept.number.value(),
        )


def updates_alone(accelerator: Any) -> bool:
    """Returns whether the optimizer alone uses gradients, so that a backward may add to ``weight.grad`` directly. There
    must be no gradient reducer, no sharding and no gradient scaler.
    """
    return accelerator.distributed_type == DistributedType.NO and accelerator.scaler is None


def _gradient_to_add_to(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns ``weight.grad`` if our backward may add the weight's gradient to it, with the same result as autograd's
    addition. Otherwise returns None.
    """
    if type(weight.grad) is not Tensor or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    usable = weight.grad.dtype in (torch.float32, dtype) and weight.grad.is_contiguous()
    return weight.grad if usable else None


class OverSets(NamedTuple):
    """A model for our override of TRL's scoring method: the scores are over the sets that the tokens were drawn from.
    ``sets``, int32 ``[rows, tokens, width]``, has the sets of the last ``tokens`` columns of all rows.
    """

    model: Any
    sets: Tensor


def over_sets(model: Any, sets: Tensor | None) -> Any:
    """Returns a model whose scores are over ``sets``, or ``model`` itself if ``sets`` is None."""
    return model if sets is None else OverSets(model, sets)


class ScoredModel:
    """A model for TRL's own scoring method. The method calls the model with consecutive chunks of a batch's rows; the
    tokens to score have labels. Our head computes the scores.

    ``sets`` is as in :class:`OverSets`. Labels that ``needed``, bool ``[rows, tokens]``, does not mark are removed, so
    that the head does not compute these tokens.
    """

    def __init__(
        self, model: Callable[..., Any], head: OurHead, sets: Tensor | None = None, needed: Tensor | None = None
    ) -> None:
        self._model, self._head, self._sets, self._needed, self._begin = model, head, sets, needed, 0

    def __call__(self, *, labels: Tensor, **inputs: Any) -> Any:
        rows, head = slice(self._begin, self._begin + len(labels)), self._head
        self._begin = rows.stop
        if self._needed is not None:
            needed = self._needed[rows]
            labels = labels.clone()
            labels[:, -needed.shape[1] :].masked_fill_(~needed, -100)
        if self._sets is not None:
            sets = self._sets[rows]
            head = replace(head, sets=(sets.flatten(0, 1), (labels[:, -sets.shape[1] :] != -100).flatten()))
        with d3s_head(head):
            return self._model(labels=labels, **inputs)


def require_same_logits(head: ModelHead, logit_scale: float, final_logit_softcapping: float | None) -> None:
    """Checks that the scale and the soft cap that TRL has read are those of the model.

    Raises:
        UnsupportedHead: they differ.
    """
    if not math.isclose(logit_scale, head.scale) or final_logit_softcapping != head.softcap:
        raise UnsupportedHead(
            f"lm_head: TRL scales the logits of {head.name} by {logit_scale:.6g} and caps them at "
            f"{final_logit_softcapping}; the model itself by {head.scale:.6g} and at {head.softcap}"
        )


def without_scale(
    logit_scale: float, temperature: float, final_logit_softcapping: float | None
) -> tuple[float, float | None]:
    """Returns the temperature and the soft cap with which our ops, which have no scale, compute TRL's logits."""
    # With scale s, cap c and temperature T, TRL computes c tanh(s x / c) / T from a logit x. This formula equals
    # (c/s) tanh(x / (c/s)) / (T/s). So our ops get the cap c/s and the temperature T/s.
    cap = None if final_logit_softcapping is None else final_logit_softcapping / logit_scale
    return temperature / logit_scale, cap


def say_that_trls_head_is_used(reason: str) -> None:
    """Warns once for each reason."""
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"d3s_kernels: TRL's own LM head is used, because {reason}", stacklevel=3)


def why_not(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, logit_scale: float, outputs: tuple[str, ...] = ()
) -> str | None:
    """Returns the reason why our head cannot be used, or None if it can be used."""
    if hasattr(weight, "ds_id"):
        return "ZeRO-3 takes the head's weight away again before its backward"
    if weight.dtype not in _FLOATS or dtype not in _FLOATS:
        return f"the head's weight is {weight.dtype} and its products {dtype}; ours takes float32, bfloat16 or float16"
    if hidden.device.type not in DEVICES:
        return f"there are no kernels here for tensors on {hidden.device.type}"
    if not logit_scale > 0:
        return f"the model scales its logits by {logit_scale}"
    unknown = sorted(set(outputs) - {"log_probs", "entropy"})
    return f"{', '.join(unknown)} is asked for" if unknown else None


@contextmanager
def d3s_head(head: OurHead | None = None) -> Iterator[None]:
    """A context in which models with TRL's fused LM head use our head. TRL's head is restored at the end."""
    # If _use_triton(device) is true, TRL passes only the labelled positions to its head; otherwise, it passes all
    # positions. Our head needs only the labelled positions, on every device.
    ours = {"_ChunkedLogProbFunction": head or OurHead(), "_use_triton": lambda device: True}
    module: dict[str, Any] = vars(trl_utils)
    theirs = {name: module[name] for name in ours if name in module}
    module.update((name, ours[name]) for name in theirs)
    try:
        yield
    finally:
        module.update(theirs)
