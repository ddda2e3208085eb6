"""Checks the types and devices of arguments, and converts arguments of several forms into the one that the ops take.

The kernels check values. The checks here run before those of torch's dispatcher, which does not find every wrong type
or device and whose messages are less clear.
"""

from __future__ import annotations

import numbers
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad


def require_tensors(**arguments: Tensor | None) -> None:
    """Raises unless all arguments are tensors on the device of the first one."""
    device = None
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}; takes a tensor")
        device = device or value.device
        _require_device(name, value, device)


def require_optional_tensors(like: Tensor, **arguments: Tensor | None) -> None:
    """Raises unless each argument is None or a tensor on the device of ``like``."""
    for name, value in arguments.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}; takes a tensor or None")
        _require_device(name, value, like.device)


def _require_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name}: is on {value.device}; takes a tensor on the device of the others, {device}")


def require_no_tangent(**arguments: Tensor | None) -> None:
    """Refuses forward-mode tangents. The ops have backward derivatives only, and torch would silently treat their
    results as constants.
    """
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for name, value in arguments.items():
        if value is not None and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(f"{name}: has a forward-mode tangent; its derivatives are made backwards alone")


def require_whole(**arguments: int | None) -> None:
    """Raises unless each argument is a whole number or None."""
    for name, value in arguments.items():
        if value is None or type(value) is int or isinstance(value, torch.SymInt):
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}: got {value!r}; takes a whole number")


def whole_number(name: str, value: object, *, at_least: int | None = None) -> int:
    """Returns the value as an int. For code outside of the ops, where no number is symbolic."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {value!r}; takes a whole number")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: got {value}; takes at least {at_least}")
    return int(value)


def require_number(**arguments: float | None) -> None:
    """Raises unless each argument is a number or None."""
    for name, value in arguments.items():
        if value is not None and not _is_number(value):
            raise TypeError(f"{name}: got {value!r}; takes a number")


def require_head_options(logit_softcap: float | None, logits_dtype: torch.dtype, **whole: int | None) -> None:
    """Checks the types of the LM head's options."""
    require_whole(**whole)
    require_number(logit_softcap=logit_softcap)
    if not isinstance(logits_dtype, torch.dtype):
        raise TypeError(f"logits_dtype: got {logits_dtype!r}; takes a torch.dtype")


def require_flag(**arguments: bool) -> None:
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: got {value!r}; takes True or False")


def require_scope(scope: str, within: str) -> bool:
    """Returns whether to pool all segments: True for "batch", False for ``within``. Refuses any other scope."""
    if scope not in ("batch", within):
        raise ValueError(f"scope: got {scope!r}; takes 'batch' or {within!r}")
    return scope == "batch"


def require_rule(rule: str, takes: tuple[str, ...]) -> None:
    if rule not in takes:
        raise ValueError(f"rule: got {rule!r}; takes one of {', '.join(map(repr, takes))}")


def require_generator(generator: torch.Generator | None, rule: str, draws: bool, like: Tensor) -> None:
    """Refuses a generator if the rule draws no numbers, or if it is for another kind of device."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}; takes a torch.Generator or None")
    if not draws:
        raise ValueError(f"generator: got one with rule {rule!r}; takes one only with rule 'random'")
    if generator.device.type != like.device.type:
        raise ValueError(f"generator: is of {generator.device}; takes one of the values' device, {like.device}")


def temperature_argument(temperature: float | Tensor, like: Tensor, rows: torch.Size) -> tuple[float, Tensor | None]:
    """Returns the number, and the tensor that replaces it, if any: float32, 0-d or one for each row."""
    if not isinstance(temperature, Tensor):
        if not _is_number(temperature):
            raise TypeError(f"temperature: got {type(temperature).__name__}; takes a number or a float tensor")
        if torch.compiler.is_compiling():
            if not 1e-15 <= temperature <= 1e15:
                raise ValueError(f"temperature: got {temperature}; takes a number above 0, in [1e-15, 1e15]")
            return 1.0, _in_a_graph(temperature, like).float()
        return temperature, None
    if not temperature.is_floating_point():
        raise TypeError(f"temperature: got dtype {temperature.dtype}; takes a float tensor")
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "temperature: got a tensor that requires a gradient; takes one that does not: none is computed"
        )
    _require_device("temperature", temperature, like.device)
    if temperature.dim() > 0 and temperature.shape != rows:
        try:
            temperature = temperature.expand(rows)
        except RuntimeError:
            raise ValueError(
                f"temperature: got shape {list(temperature.shape)}; takes one that broadcasts to the rows, {list(rows)}"
            ) from None
    return 1.0, temperature.float()


def ratio_argument(ratio: float | Tensor | None, like: Tensor) -> tuple[float | None, Tensor | None]:
    """Returns the number, or the 0-d tensor that replaces it; the other one is None."""
    if isinstance(ratio, Tensor):
        _require_device("ratio", ratio, like.device)
        return None, ratio
    if ratio is not None and not _is_number(ratio):
        raise TypeError(f"ratio: got {type(ratio).__name__}; takes a number or a 0-d tensor")
    if ratio is not None and torch.compiler.is_compiling():
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: got {ratio}; takes a number in (0, 1]")
        return None, _in_a_graph(ratio, like)
    return ratio, None


def _in_a_graph(value: float, like: Tensor) -> Tensor:
    """The number as a 0-d tensor, since torch.compile would compile a new graph for each float. The caller checks the
    value before, because the kernels do not check the value of a tensor on a GPU.
    """
    return torch.ones((), dtype=torch.float64, device=like.device) * value


def whole_or_tensor(name: str, value: int | Tensor, like: Tensor) -> tuple[int | None, Tensor | None]:
    if isinstance(value, Tensor):
        _require_device(name, value, like.device)
        return None, value
    if value is None:
        raise TypeError(f"{name}: got None; takes a whole number or a 0-d integer tensor")
    require_whole(**{name: value})
    return value, None


def require_keep(keep: int | Tensor) -> None:
    """Refuses a ``keep`` below 1. The value of a tensor is checked only if :func:`is_known` lets the host read it."""
    if isinstance(keep, Tensor):
        if keep.numel() != 1 or keep.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"keep: got shape {list(keep.shape)} of {keep.dtype}; takes a number or a 0-d int64 or int32 tensor"
            )
        if torch.compiler.is_compiling() or not is_known(keep):
            return
        keep = int(keep)
    if keep < 1:
        raise ValueError(f"keep: got {keep}; takes at least 1")


def checks_everything() -> bool:
    """Whether ``D3S_KERNELS_CHECK=1`` asks for checks that wait for a GPU or for the other ranks."""
    return os.environ.get("D3S_KERNELS_CHECK") == "1"


def is_known(tensor: Tensor) -> bool:
    """Whether the host may read the values: without waiting for a device, or because checks that wait are enabled."""
    return tensor.is_cpu or checks_everything()


def _is_number(value: object) -> bool:
    if type(value) is float or type(value) is int:  # the usual case first: an abstract class is slow
        return True
    return isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
