"""The gradient of the head's weight where Megatron keeps it: in ``main_grad``, a part of DistributedDataParallel's
buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_main_grad(weight: Tensor, is_fused: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the weight for an op, and the tensor to which the op's backward must add the weight's gradient, or None
    if autograd is to get the gradient. ``is_fused``: whether Megatron's own layers add to ``main_grad`` too.
    """
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError("weight: got a parameter of Megatron-FSDP, which gathers it; takes DistributedDataParallel's")
    needed = torch.is_grad_enabled() and weight.requires_grad
    # DistributedDataParallel sets both. Without its hook, nobody would read main_grad.
    if not needed or not hasattr(weight, "main_grad") or not hasattr(weight, "grad_added_to_main_grad"):
        return weight, None
    return _InMainGrad.apply(weight, is_fused), weight.main_grad  # type: ignore[no-untyped-call]


class _InMainGrad(torch.autograd.Function):
    """The weight as it is. Its gradient is in ``main_grad`` when the backward gets here. DistributedDataParallel's hook
    on the weight must still run, and with ``overlap_grad_reduce`` it needs a tensor in ``weight.grad``: here zeros. The
    hook adds it to ``main_grad``, together with what other uses of the weight (an embedding, logits) gave to autograd.

    If no other use gives its gradient to autograd, ``grad_added_to_main_grad`` spares the hook this pass, as after
    Megatron's own layers, and the tensor may have any values.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, is_fused: bool) -> Tensor:
        ctx.weight, ctx.is_fused = weight, is_fused
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None]:
        assert gradient is None
        if not ctx.is_fused or getattr(ctx.weight, "zero_out_wgrad", False):  # the second: a tied embedding's weight
            return torch.zeros_like(ctx.weight), None
        ctx.weight.grad_added_to_main_grad = True
        return torch.empty_like(ctx.weight), None
