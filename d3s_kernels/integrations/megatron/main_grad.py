"""The gradient of the head's weight where Megatron keeps it: in ``main_grad``, a part of DistributedDataParallel's
buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_main_grad(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the weight for an op, and the tensor to which the op's backward must add the weight's gradient. The
    second is None if autograd is to get the gradient.
    """
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError("weight: got a parameter of Megatron-FSDP, which gathers it; takes DistributedDataParallel's")
    needed = torch.is_grad_enabled() and weight.requires_grad
    # Megatron's layers set the second attribute, and DistributedDataParallel reads it: without it, nobody would know.
    if not needed or not hasattr(weight, "main_grad") or not hasattr(weight, "grad_added_to_main_grad"):
        return weight, None
    return _InMainGrad.apply(weight), weight.main_grad  # type: ignore[no-untyped-call]


class _InMainGrad(torch.autograd.Function):
    """The weight as it is. Its gradient is in ``main_grad`` when the backward gets here. DistributedDataParallel's hook
    on the weight must still run, and with ``overlap_grad_reduce`` it needs a gradient in ``weight.grad``. As Megatron's
    layers do, this backward returns a tensor that nobody reads. If the embedding shares the weight, autograd adds the
    embedding's gradient to this tensor, and the hook adds the sum to ``main_grad``; so the tensor is 0 then.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        assert gradient is None
        ctx.weight.grad_added_to_main_grad = True
        shared = getattr(ctx.weight, "zero_out_wgrad", False)
        return torch.zeros_like(ctx.weight) if shared else torch.empty_like(ctx.weight)
