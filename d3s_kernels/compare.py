"""Runs a call on every back-end that runs here and compares the results with the reference, for bug reports."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ratios, rollouts, tokens, vocabulary
from ._arguments import as_bool, require_plain
from ._dispatch import backends
from ._exact import FUNCTIONS, Row, row_of_op, written_arguments
from ._head.problem import operands
from .sampling import SamplingMask

_PUBLIC = (ratios, rollouts, tokens, vocabulary)
_SEED = 0  # for calls that draw without a generator, and for the incoming gradients


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
    row, call = row_of(function)
    arguments = _named(call, args, kwargs)
    require_plain(**arguments)
    if inspect.isfunction(function):
        arguments |= _as_ops_take_them(arguments)
    found, refusals = Comparison(), []
    for backend, device in _backends(arguments):
        with backends.forced(backend):
            try:
                # The reference runs on the device of the call, so that both draw the same random numbers.
                there = moved(arguments, device if inspect.isfunction(function) else torch.device("cpu"))
                found += compare_here(row, call, there, device, backend)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                refusals.append(error)
                found.append(Difference(backend, f"{type(error).__name__}: {error}", None, math.inf, 0.0))
    if refusals and len(refusals) == len(found):  # every back-end refuses these arguments
        raise refusals[0]
    return found


def compare_here(
    row: Row, call: Callable[..., Any], arguments: Mapping[str, Any], device: torch.device, backend: str
) -> list[Difference]:
    """Compares the results of the active back-end on ``device`` with the row's exact results, which are computed on the
    arguments' own device. The given tensors are never written: both calls get copies.
    """
    home = next((part.device for part in arguments.values() if isinstance(part, Tensor)), device)
    leaves = [name for name in row.gradients if isinstance(part := arguments.get(name), Tensor) and part.requires_grad]
    in_float64 = {name: arguments[name].detach().double().requires_grad_() for name in leaves}
    found, exact_arguments = called(call, moved(arguments, device)), moved(arguments, home) | in_float64
    if row.from_found:
        exact_arguments["found"] = dict(zip(row.results, (part.to(home) for part in found.results), strict=True))
    exact = called(row.means, exact_arguments)
    known, generator = dict(arguments), torch.Generator().manual_seed(_SEED)
    asked = [name for name, part in zip(row.results, found.results, strict=True) if leaves and part.requires_grad]
    for name, part in zip(row.results, found.results, strict=True):
        if name in asked:  # allowed errors depend on the incoming gradients
            known[f"grad_{name}"] = torch.randn(part.shape, generator=generator).to(home)
    pairs = list(zip(row.results, found.results, exact.results, strict=True))
    if asked:
        both = (_gradients(side, row, leaves, asked, known) for side in (found, exact))
        pairs += zip((f"gradient of {name}" for name in leaves), *both, strict=True)
    rules = {**row.results} | {f"gradient of {name}": rule for name, rule in row.gradients.items()}
    return [
        _worst(backend, name, ours.detach().to(home), theirs.detach(), rules[name](theirs.detach(), known))
        for name, ours, theirs in pairs
        if theirs is not None
    ]


class _Call(NamedTuple):
    arguments: dict[str, Any]
    results: tuple[Any, ...]


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> _Call:
    """Calls a function or an op with the same seed each time. A tensor that an op writes is a result."""
    devices = {part.device for part in arguments.values() if isinstance(part, Tensor) and part.is_cuda}
    # torch.manual_seed would format the stack once for each kind of device that is not there.
    seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices), torch.enable_grad():
        seed(_SEED)
        results = function(**arguments)
    if results is None or isinstance(results, Tensor):
        results = () if results is None else (results,)
    schema = getattr(function, "_schema", None)  # a Python function writes no argument
    written = () if schema is None else written_arguments(schema.name.partition("::")[2])
    return _Call(arguments, (*(arguments.get(name) for name in written), *results))


def _gradients(
    side: _Call, row: Row, leaves: list[str], asked: list[str], known: Mapping[str, Any]
) -> Iterable[Tensor]:
    results = [part for name, part in zip(row.results, side.results, strict=True) if name in asked]
    incoming = [known[f"grad_{name}"].to(part) for name, part in zip(asked, results, strict=True)]
    return torch.autograd.grad(results, [side.arguments[name] for name in leaves], incoming)


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


def public(name: str) -> Callable[..., Any]:
    """The public function of ``FUNCTIONS`` with this name."""
    found: Callable[..., Any] = next(getattr(module, name) for module in _PUBLIC if hasattr(module, name))
    return found


def _runs_alone(schema: Any) -> bool:
    return not any(part.name == "group_name" and not part.has_default_value() for part in schema.arguments)


def row_of(function: Any) -> tuple[Row, Callable[..., Any]]:
    """The row of a public function or an op, and what to call. Refuses an op that needs a process group."""
    name, schema = getattr(function, "__name__", ""), getattr(getattr(function, "default", function), "_schema", None)
    if name in FUNCTIONS and public(name) is function:
        return FUNCTIONS[name], function
    namespace, _, op = schema.name.partition("::") if schema else ("", "", "")
    if namespace == "d3s_kernels" and _runs_alone(schema):
        return row_of_op(op), getattr(torch.ops.d3s_kernels, op).default
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


def _backends(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.device]]:
    """Each back-end and its device: all that run where the arguments are, and the compiled CPU library."""
    own = next((part.device for part in arguments.values() if isinstance(part, Tensor)), torch.device("cpu"))
    for device in dict.fromkeys((own, torch.device("cpu"))):
        yield from ((name, device) for name in backends.runnable(device.type) if device == own or name == "cpu")


def moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on that device, with the same strides and the same alignment with respect to 16 bytes."""
    return {name: _moved(part, device) for name, part in arguments.items()}


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Generator):
        there = torch.Generator(device)
        same = part.device.type == device.type
        return there.set_state(part.get_state()) if same else there.manual_seed(part.initial_seed())
    if isinstance(part, SamplingMask):
        return SamplingMask(copied(part.token_ids, device), copied(part.offsets, device))
    return copied(part, device) if isinstance(part, Tensor) else part


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach().untyped_storage())
    copy = whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.detach().requires_grad_(tensor.requires_grad)
