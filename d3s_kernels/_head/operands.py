"""What the LM head multiplies, in the form that its ops take: a whole weight, and one dtype.

Where dtypes differ and one is float32, all become float32. Autograd gives each argument its gradient in its own dtype,
and no op has to know of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import require_readable
from .at_backward import require_room_for_gradient
from .problem import FLOATS, not_fitting, require_memory, why_not_whole

Operands = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states, weight and bias."""


def operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, weight_grad_into: Tensor | None, name: str = "weight"
) -> Operands:
    """The operands in one dtype, for a weight that callers know by this name. Also checks ``weight_grad_into``."""
    if weight.dim() != 2:
        require_readable(**{name: weight})
        raise ValueError(f"{name}: got shape {list(weight.shape)}; takes [V, H]{why_not_whole(name, weight)}")
    if weight_grad_into is not None:
        require_room_for_gradient(weight_grad_into, weight, name)
    dtype = hidden.dtype
    if weight.dtype is dtype and (bias is None or bias.dtype is dtype):
        return hidden, weight, bias
    _require_float32_among(hidden, weight, bias, name)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise not_fitting(weight, bias)
    if not torch.compiler.is_compiling():
        require_memory(weight, bias)  # before it is read
    if weight_grad_into is not None and weight_grad_into.dtype != torch.float32:
        raise ValueError(
            f"weight_grad_into: got dtype {weight_grad_into.dtype}; takes float32, since dtypes differ and the "
            f"products are made in float32: hidden is {dtype}, {name} is {weight.dtype}"
        )
    return hidden.float(), weight.float(), None if bias is None else bias.float()


def _require_float32_among(hidden: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> None:
    given = {"hidden": hidden.dtype, name: weight.dtype} | ({} if bias is None else {"bias": bias.dtype})
    for argument, dtype in given.items():
        if dtype not in FLOATS:
            # Bytes are what a quantised weight is stored as: bitsandbytes' Int8Params and Params4bit.
            hint = "; a quantised one has to be dequantised first" if dtype.itemsize == 1 else ""
            raise ValueError(f"{argument}: got dtype {dtype}; takes float32, bfloat16 or float16{hint}")
    if torch.float32 not in given.values():
        argument = next(argument for argument, dtype in given.items() if dtype != hidden.dtype)
        raise ValueError(
            f"{argument}: got dtype {given[argument]}; takes float32 or the dtype of hidden, {hidden.dtype}"
        )
