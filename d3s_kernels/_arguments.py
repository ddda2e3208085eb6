"""Arguments that come in several forms, brought into the one that the ops take."""

from __future__ import annotations

import torch
from torch import Tensor


def require_tensors(**arguments: Tensor | None) -> None:
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}; takes a tensor")


def temperature_argument(temperature: float | Tensor, rows: torch.Size) -> tuple[float, Tensor | None]:
    """The number, or the tensor that replaces it: float32, 0-d or one for each row."""
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float, torch.SymFloat)):
            raise TypeError(f"temperature: got {type(temperature).__name__}; takes a number or a float tensor")
        return temperature, None
    if not temperature.is_floating_point():
        raise TypeError(f"temperature: got dtype {temperature.dtype}; takes a float tensor")
    if temperature.dim() > 0 and temperature.shape != rows:
        try:
            temperature = temperature.expand(rows)
        except RuntimeError:
            raise ValueError(
                f"temperature: got shape {list(temperature.shape)}; takes one that broadcasts to the rows, {list(rows)}"
            ) from None
    return 1.0, temperature.float()


def number_or_tensor(name: str, value: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    if isinstance(value, Tensor):
        return None, value
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers)):
        raise TypeError(f"{name}: got {type(value).__name__}; takes a number or a 0-d tensor")
    return value, None


def require_scope(scope: str, within: str) -> bool:
    """Whether to pool: ``scope`` is "batch" or ``within``."""
    if scope not in ("batch", within):
        raise ValueError(f"scope: got {scope!r}; takes 'batch' or {within!r}")
    return scope == "batch"
