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
    # DistributedDataParallel sets both. Without its hook, nobody would read main_grad.
    if not needed or not hasattr(weight, "main_grad") or not hasattr(weight, "grad_added_to_main_grad"):
        return weight, None
    return _InMainGrad.apply(weight), weight.main_grad  # type: ignore[no-untyped-call]


class _InMainGrad(torch.autograd.Function):
    """The weight as it is. Its gradient is in ``main_grad`` when the backward gets here. DistributedDataParallel's hook
    on the weight must still run, and with ``overlap_grad_reduce`` it needs a tensor in ``weight.grad``: here a sparse
    one without elements, which takes no memory, and which the hook adds to ``main_grad`` in no time.

    Megatron's layers set ``grad_added_to_main_grad``, so that the hook leaves ``weight.grad`` out. Here it must not:
    what other uses of the weight (an embedding, logits) gave to autograd may be in it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.like = weight.shape, weight.dtype, weight.device
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        assert gradient is None
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
