"""Computes logits from hidden states, and the products of the backward. The matrix products are torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

_op = torch.ops.d3s_kernels
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

_UPCAST_BYTES = 16 << 20  # of float32 weight at a time, if the device has no product that widens its result
# Terms of a sum that one product makes: some BLAS libraries lose digits over more. If there are only a few rows, or for
# the last few, they add all terms one by one. A gradient is a sum over the vocabulary of terms that mostly cancel.
_TERMS, _TERMS_OF_FEW_ROWS, _FEW_ROWS = 8192, 1024, 64


class Head(NamedTuple):
    """An LM head."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logits_dtype: torch.dtype

    def logits(self, hidden: Tensor, tokens: slice, out: Tensor) -> Tensor:
        weight = self.weight[tokens]
        if out.dtype == hidden.dtype:
            torch.mm(hidden, weight.t(), out=out)
        elif widens(hidden):
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        elif hidden.is_cpu and hidden.dtype == torch.bfloat16:
            _op.wide_product_.default(hidden, weight, out)
        else:
            wide = hidden.to(out.dtype)
            step = max(1, _UPCAST_BYTES // (4 * max(1, hidden.shape[1])))
            for begin in range(0, weight.shape[0], step):
                torch.mm(wide, weight[begin : begin + step].to(out.dtype).t(), out=out[:, begin : begin + step])
        if self.bias is not None:
            out.add_(self.bias[tokens])
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``total += a @ b``, or ``total = a @ b`` for the first one. A CPU rounds a product in half precision before it is
    added.
    """
    if total.dtype != a.dtype and widens(a):
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    step = _TERMS_OF_FEW_ROWS if a.shape[0] < _FEW_ROWS else _TERMS
    if first and total.dtype == a.dtype and a.shape[1] <= step:
        torch.mm(a, b, out=total)
        return
    for begin in range(0, a.shape[1], step):
        left, right = a[:, begin : begin + step], b[begin : begin + step]
        if first and begin == 0:
            total.copy_(left @ right)
        elif total.dtype == a.dtype and not _sums_apart(a):
            total.addmm_(left, right)
        else:
            total.add_(left @ right)


def _sums_apart(values: Tensor) -> bool:
    """Whether a product is summed before it is added to a total. Some BLAS libraries of CPUs add each term to the
    total, and lose a digit or two over a whole vocabulary.
    """
    return values.is_cpu


def widens(values: Tensor) -> bool:
    """Whether torch has products of half precision with a float32 result on this device."""
    return values.is_cuda and torch.version.cuda is not None


def without_autocast(function: _Kernel) -> _Kernel:
    """Makes products keep the precision of their arguments, even if a backward runs within torch.autocast."""

    @wraps(function)
    def run(problem: Any, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(problem.hidden.device.type, enabled=False):
            return function(problem, *arguments, **options)

    return cast(_Kernel, run)
