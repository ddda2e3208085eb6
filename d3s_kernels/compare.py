"""Runs a call on every back-end that runs here and compares the results with the reference, for bug reports."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ratios, rollouts, tokens, vocabulary
from ._arguments import as_bool, require_plain
from ._dispatch import backends
from ._head.problem import operands
from ._table.outcomes import copied, outcomes
from ._table.table import FUNCTIONS, OPS, Row
from .sampling import SamplingMask

_PUBLIC = (ratios, rollouts, tokens, vocabulary)


class Difference(NamedTuple):
    """The worst place of one result of a back-end: where the error is the largest share of the allowed error."""

    backend: str
    output: str
    """The name of a result, "gradient of" and an argument, or the exception that was raised."""
    index: tuple[int, ...] | None  # type: ignore[assignment]  # hides tuple.index
    """The place in the output; None for an empty result, for a wrong shape or dtype, and for an exception."""
    error: float
    """The distance from the reference there; infinite where one is NaN or infinite and the other is not."""
    allowed: float
    """The distance that is allowed there; 0 where the two have to be equal."""

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error as a share of the allowed error: 0 without an error, infinite if none is allowed."""
        return 0.0 if self.error == 0 else self.error / self.allowed if self.allowed > 0 else math.inf


class Comparison(list[Difference]):
    """A :class:`Difference` for each back-end and result. Prints as a table."""

    @property
    def agrees(self) -> bool:
        """Whether every back-end is within the allowed error everywhere."""
        return all(difference.agrees for difference in self)

    def __str__(self) -> str:
        head = ("back-end", "output", "index", "largest error", "allowed", "")
        cells = [
            (row.backend, row.output, _place(row.index), f"{row.error:.2g}", f"{row.allowed:.2g}", _verdict(row))
            for row in self
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *cells)
        )

    __repr__ = __str__


def _place(index: tuple[int, ...] | None) -> str:
    return "-" if index is None else str(list(index))


def _verdict(difference: Difference) -> str:
    return "" if difference.agrees else "WRONG"


def compare(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Comparison:
    """Returns how far each back-end that runs here is from the reference, for one call: for users and bug reports.

    The reference is the function of the same name in ``d3s_kernels.reference``, in plain PyTorch and float64. If an
    argument requires a gradient, gradients are compared as well; the incoming gradients are normal random numbers.
    All calls draw the same random numbers. The arguments are not changed.

    Args:
        function: a public function of ``d3s_kernels`` that takes tensors, such as ``d3s_kernels.topk_mask``; or an op
            of the library, such as ``torch.ops.d3s_kernels.topk_order_keys``.
        args, kwargs: the arguments of the call. If they are on a GPU, the compiled CPU library gets a copy of them too.

    Returns:
        :class:`Comparison`: for each back-end and each result, the name of both, the index of the result's worst place,
        the error there, and the error that is allowed there.

    Raises:
        TypeError: the function is not one of the library, or gets a process group.
        ValueError, TypeError: arguments that all back-ends refuse.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> found = d3s.compare(d3s.topk_mask, torch.tensor([3.0, 1.0, 3.0]), 0.5)
        >>> found.agrees
        True
        >>> found[0]
        Difference(backend='cpu', output='mask', index=(0,), error=0.0, allowed=0.0)
    """
    row, call = _row_of(function)
    arguments = _named(call, args, kwargs)
    require_plain(**arguments)
    if inspect.isfunction(function):
        arguments |= _as_ops_take_them(arguments)
    found, refusals = Comparison(), []
    for label, device, backend in _backends(arguments):
        with backends.forced(backend):
            try:
                found += compare_here(row, call, *_both(function, arguments, device), label)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                refusals.append(error)
                found.append(Difference(label, f"{type(error).__name__}: {error}", None, math.inf, 0.0))
    if refusals and len(refusals) == len(found):  # every back-end refuses these arguments
        raise refusals[0]
    return found


def compare_here(
    row: Row, call: Callable[..., Any], arguments: Mapping[str, Any], sent: Mapping[str, Any], backend: str
) -> list[Difference]:
    """Compares the call on the active back-end, with ``sent`` on its device, and the meaning of the same arguments."""
    return [_worst(backend, *outcome) for outcome in outcomes(row, call, arguments, sent)]


def _worst(backend: str, name: str, found: Tensor, exact: Tensor, allowed: Tensor) -> Difference:
    if found.shape != exact.shape or (not exact.dtype.is_floating_point and found.dtype != exact.dtype):
        was = f"{name}: {found.dtype} {list(found.shape)}, not {exact.dtype} {list(exact.shape)}"
        return Difference(backend, was, None, math.inf, 0.0)
    if found.numel() == 0:
        return Difference(backend, name, None, 0.0, 0.0)
    exact = exact.to(found.dtype)  # a result beyond the range of float32 is infinite
    one, other = found.double().flatten(), exact.double().flatten()
    same = (one == other) | (one.isnan() & other.isnan())
    error = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)
    limit = allowed.double().expand(exact.shape).flatten()
    # The share of the allowed error that is used. Numbers beyond their limit rank first, above all where it is 0.
    share = torch.where(error <= limit, error / limit.clamp(min=1e-300), 2 + error / limit.clamp(min=1e-300))
    place = int(share.nan_to_num(posinf=torch.finfo(torch.float64).max).argmax())
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(place), found.shape))
    return Difference(backend, name, index, float(error[place]), float(limit[place]))


# ---- what is called, and where --------------------------------------------------------------------------------------


def _row_of(function: Any) -> tuple[Row, Callable[..., Any]]:
    for name, row in OPS.items():
        packet = getattr(torch.ops.d3s_kernels, name)
        if function in (packet, packet.default) and row.served_by != "ranks":
            return row, packet.default
    name = getattr(function, "__name__", "")
    if name in FUNCTIONS and any(getattr(module, name, None) is function for module in _PUBLIC):
        return FUNCTIONS[name], function
    raise TypeError(
        f"function: got {getattr(function, '__qualname__', function)!r}; takes an op of torch.ops.d3s_kernels that "
        f"needs no process group, or a function of d3s_kernels: {', '.join(FUNCTIONS)}"
    )


def _named(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments by name, without those about process groups. Refuses a process group."""
    if isinstance(function, torch._ops.OpOverload):
        names = [argument.name for argument in function._schema.arguments]
        return dict(zip(names, args, strict=False)) | dict(kwargs)
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    of_ranks = [name for name in ("process_group", "equal_rows") if given.get(name)]
    if of_ranks:
        raise TypeError(f"{of_ranks[0]}: got one; takes none: what is compared is computed by one process")
    return {name: value for name, value in given.items() if name not in ("process_group", "placement", "equal_rows")}


def _as_ops_take_them(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function converts before any back-end sees them."""
    found: dict[str, Any] = {
        name: as_bool(name, value) for name, value in given.items() if name == "mask" and isinstance(value, Tensor)
    }
    if isinstance(given.get("hidden"), Tensor) and isinstance(given.get("weight"), Tensor):
        head = operands(given["hidden"], given["weight"], given.get("bias"), given.get("weight_grad_into"))
        found.update(zip(("hidden", "weight", "bias"), head, strict=True))
    return found


def _both(
    function: Any, arguments: Mapping[str, Any], device: torch.device
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The arguments for the reference and for the call. The reference of a public function runs on the device of the
    call, so that both draw the same random numbers.
    """
    sent = moved(arguments, device)
    return (sent if inspect.isfunction(function) else moved(arguments, torch.device("cpu"))), sent


def _backends(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.device, str]]:
    """The label of each back-end in the results, its device, and its name."""
    own = next((part.device for part in arguments.values() if isinstance(part, Tensor)), torch.device("cpu"))
    for device in dict.fromkeys((own, torch.device("cpu"))):
        for backend in backends.runnable(device.type):
            if device == own or backend == "cpu":
                yield backend, device, backend


def moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on that device, with the same strides and the same alignment with respect to 16 bytes."""
    return {name: _moved(part, device) for name, part in arguments.items()}


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Generator) and part.device.type != device.type:
        return torch.Generator(device).manual_seed(part.initial_seed())
    if isinstance(part, SamplingMask):
        return SamplingMask(copied(part.token_ids, device), copied(part.offsets, device))
    return copied(part, device) if isinstance(part, Tensor) else part
