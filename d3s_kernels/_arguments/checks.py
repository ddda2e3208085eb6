"""Checks the types and devices of arguments, and converts arguments to the form that the ops take.

The kernels check the values of tensors. The checks here run before torch's dispatcher. The dispatcher does not detect
every wrong type or device, and its error messages are less clear.
"""

from __future__ import annotations

import numbers
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .bundles import SegmentFields


def require_tensors(**arguments: Tensor | None) -> None:
    """Raises unless all arguments are tensors that the ops can read, and are on the device of the first argument."""
    device = None
    for name, value in arguments.items():
        if type(value) is not Tensor and type(value) is not Parameter:
            value = _require_subclass(name, value, "a tensor")
        if len(arguments) == 1:
            return
        if device is None:
            device = value.device
        elif value.device != device:
            raise _on_another_device(name, value, device)


def require_optional_tensors(like: Tensor, **arguments: Tensor | None) -> None:
    """Raises unless each argument is None, or a tensor that the ops can read and that is on the device of ``like``."""
    for name, value in arguments.items():
        if value is not None:
            _require_device(name, value, like.device)


def require_segments(like: Tensor, segments: SegmentFields) -> None:
    """Checks the types of the arguments that describe the segments of ``like``."""
    offsets, max_segment, _ = segments
    if offsets is not None:
        _require_device("offsets", offsets, like.device)
    if max_segment is not None:
        require_whole(max_segment=max_segment)


def _require_device(name: str, value: Tensor, device: torch.device) -> None:
    if type(value) is not Tensor and type(value) is not Parameter:
        _require_subclass(name, value, "a tensor or None")
    if value.device != device:
        raise _on_another_device(name, value, device)


def _on_another_device(name: str, value: Tensor, device: torch.device) -> ValueError:
    return ValueError(f"{name}: is on {value.device}; takes a tensor on the device of the others, {device}")


def _require_subclass(name: str, value: object, takes: str) -> Tensor:
    """Checks that a value is a tensor that the ops can read, and returns it. To save time, callers skip this check for
    a plain Tensor or Parameter: the dispatcher refuses these if the ops cannot read their layout
    (``_dispatch/registration.py``).
    """
    if not isinstance(value, Tensor):
        raise no_tensor(name, value, takes)
    require_readable(**{name: value})
    return value


def no_tensor(name: str, value: object, takes: str = "a tensor") -> TypeError:
    """Returns the error for a value that is no tensor. For an array or a list, the message says how to make a tensor
    from it.
    """
    kind = type(value).__name__
    made = {"ndarray": "torch.from_numpy", "list": "torch.tensor", "tuple": "torch.tensor"}.get(kind)
    return TypeError(f"{name}: got {kind}; takes {takes}" + (f": {made}({name}) is one" if made else ""))


def require_readable(**arguments: object) -> None:
    """Raises for tensors whose values the ops cannot read: DTensors, nested, sparse and quantised tensors."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and (reason := why_unreadable(name, value)) is not None:
            raise TypeError(f"{name}: got {reason}")


def require_values(**arguments: object) -> None:
    """Like :func:`require_readable`, but also raises for tensors on the meta device, which have no values."""
    require_readable(**arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name}: is on meta, which has no values; takes a tensor on another device")


def require_plain(**arguments: object) -> None:
    """Like :func:`require_values`, but also raises for wrapper subclasses, which have no memory of their own."""
    require_values(**arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TypeError(f"{name}: got a {type(value).__name__}; takes a plain tensor")


def why_unreadable(name: str, value: Tensor) -> str | None:
    """Returns why the ops cannot read the tensor, and how to make it readable; None if the ops can read it."""
    kind = type(value)
    if hasattr(kind, "to_local"):  # a DTensor; under torch.compile, hasattr(value, ...) is False
        also = ""
        if name == "weight":
            also = (
                "; FSDP2 gathers it within the forward of its module, and within a method that was given to "
                "register_fsdp_forward_method; where its ranks share the vocabulary of the same "
                "rows, d3s_kernels.distributed.vocab_parallel_linear_logprob_entropy takes it"
            )
        return (
            f"a {kind.__name__}; takes a plain tensor: full_tensor() is all of it, to_local() this rank's part, with "
            f"process_group= where the function takes one{also}"
        )
    if value.is_nested:
        return "a nested tensor; takes its values(), with offsets= its offsets() where the function takes offsets"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}; takes a dense one: to_dense() makes it"
    if value.is_quantized or kind.dequantize is not Tensor.dequantize:
        return f"a quantised tensor, {kind.__name__} of {value.dtype}; takes one of its numbers: dequantize() makes it"
    return None


def checked_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Checks that the mask is on the device of ``like``, and converts it to bool."""
    if mask is None:
        return None
    _require_device("mask", mask, like.device)
    return mask if mask.dtype is torch.bool else as_bool("mask", mask)


def as_bool(name: str, mask: Tensor) -> Tensor:
    """Converts an integer mask to bool, since tokenizers and trainers make integer masks."""
    dtype = mask.dtype
    if dtype is torch.bool:
        return mask
    require_readable(**{name: mask})
    if not dtype.is_floating_point and not dtype.is_complex:
        return mask != 0
    raise ValueError(
        f"{name}: got dtype {dtype}; takes bool or integers (True where they are not 0). A float mask may also be one "
        "that is added to logits, 0 where a token counts: pass mask > 0 or mask == 0, whichever is meant"
    )


def as_float32(name: str, values: Tensor) -> Tensor:
    if values.dtype == torch.float32:
        return values
    if values.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: got dtype {values.dtype}; takes float32, bfloat16 or float16")
    return values.float()


def integers_as_float32(name: str, values: Tensor) -> Tensor:
    """Converts bool and integers to float32, and returns other values as they are."""
    if values.dtype.is_floating_point or values.dtype.is_complex:
        return values
    require_readable(**{name: values})
    return values.float()


def require_no_tangent(**arguments: Tensor | None) -> None:
    """Raises for tensors with a forward-mode tangent: torch would silently treat the ops' results as constants."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for name, value in arguments.items():
        if value is not None and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(f"{name}: has a forward-mode tangent; its derivatives are made backwards alone")


def require_whole(**arguments: int | None) -> None:
    """Raises unless each argument is a whole number or None."""
    for name, value in arguments.items():
        if value is not None and type(value) is not int and not isinstance(value, torch.SymInt):
            whole_number(name, value)


def whole_number(name: str, value: object, *, at_least: int | None = None) -> int:
    """Returns the value as an int. Refuses symbolic integers (torch.compile), which :func:`require_whole` accepts."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {value!r}; takes a whole number")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: got {value}; takes at least {at_least}")
    return int(value)


def require_number(**arguments: float) -> None:
    for name, value in arguments.items():
        if not is_number(value):
            raise TypeError(f"{name}: got {value!r}; takes a number")


def require_flag(name: str, value: bool) -> None:
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


def require_temperature(number: float) -> None:
    """Refuses a Python number that is not a valid temperature. The ops refuse such a number too, but not in a compiled
    graph.
    """
    require_number(temperature=number)
    if not 1e-15 <= number <= 1e15:
        raise ValueError(f"temperature: got {number}; takes a number above 0, in [1e-15, 1e15]")


def temperature_argument(temperature: float | Tensor, like: Tensor) -> tuple[float, Tensor | None]:
    """Checks a temperature, and returns the ops' two arguments for it: a Python number and None; or 1.0 and a float32
    tensor, which is 0-d or has one value for each row of ``like``. Under torch.compile, a number becomes a 0-d tensor.
    """
    if type(temperature) is float or not isinstance(temperature, Tensor):
        if type(temperature) is not float and not is_number(temperature):
            raise no_tensor("temperature", temperature, "a number or a float tensor")
        if torch.compiler.is_compiling():
            require_temperature(temperature)
            return 1.0, in_a_graph(temperature, like).float()
        return temperature, None
    if not temperature.is_floating_point():
        raise TypeError(f"temperature: got dtype {temperature.dtype}; takes a float tensor")
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "temperature: got a tensor that requires a gradient; takes one that does not: none is computed"
        )
    _require_device("temperature", temperature, like.device)
    if temperature.dim() > 0 and temperature.shape != (rows := like.shape[:-1]):
        try:
            temperature = temperature.expand(rows)
        except RuntimeError:
            raise ValueError(
                f"temperature: got shape {list(temperature.shape)}; takes one that broadcasts to the rows, {list(rows)}"
            ) from None
    return 1.0, temperature.float()


def in_a_graph(value: float, like: Tensor) -> Tensor:
    """Returns the number as a 0-d tensor, since torch.compile would compile a new graph for each value of a float. The
    caller has to check the number, because kernels on a GPU do not check the values of tensors.
    """
    return torch.ones((), dtype=torch.float64, device=like.device) * value


def checks_everything() -> bool:
    """Returns whether ``D3S_KERNELS_CHECK=1`` enables the checks that wait for a GPU or for other ranks."""
    return os.environ.get("D3S_KERNELS_CHECK") == "1"


def is_known(tensor: Tensor) -> bool:
    """Returns whether the host may read the tensor's values: on a CPU always, on other devices only under
    ``D3S_KERNELS_CHECK=1``.
    """
    return tensor.is_cpu or checks_everything()


def is_number(value: object) -> bool:
    if type(value) is float or type(value) is int:  # the usual case first: isinstance is slow for abstract classes
        return True
    return isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
