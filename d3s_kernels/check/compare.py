"""Runs one call on every back-end that works here, and compares the results with the reference, for bug reports."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.checks import as_bool, require_plain
from .._dispatch import backends
from .._lm_head.problem import operands
from ..logprobs import logprob_entropy, token_logprobs, topk_logprobs
from ..off_policy import importance_ratio
from ..rollouts import select_rollouts
from ..support.sampling_mask import SamplingMask
from ..tokens import select_tokens
from .tolerances import FUNCTIONS, Row, row_of_op, written_arguments

_CPU = torch.device("cpu")
_SEED = 0  # for calls that draw random numbers without a generator, and for the incoming gradients


class Difference(NamedTuple):
    """The worst element of one result of a back-end: the element with the largest ``share``."""

    backend: str
    output: str
    """The name of a result; or "gradient of" and the name of an argument; or the exception that was raised."""
    index: tuple[int, ...] | None  # type: ignore[assignment]  # hides tuple.index
    """The index of the element; () for a wrong shape or dtype, None for an empty result or an exception."""
    error: float
    """The distance of the element from the reference; infinite if only one of the two values is NaN or infinite."""
    allowed: float
    """The allowed distance of the element from the reference; 0 if the two have to be equal."""

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error as a share of the allowed error; infinite if there is an error but none is allowed."""
        return 0.0 if self.error == 0 else self.error / self.allowed if self.allowed > 0 else math.inf


class Comparison(list[Difference]):
    """A list with one :class:`Difference` for each result of each back-end. When printed, the list is a table."""

    @property
    def agrees(self) -> bool:
        """Whether all errors are within the allowed errors."""
        return all(difference.agrees for difference in self)

    def __str__(self) -> str:
        table = [("back-end", "output", "index", "largest error", "allowed", "")]
        for backend, output, index, error, allowed in self:
            verdict = "" if error <= allowed else "WRONG"
            place = str(list(index)) if index else "-"
            table.append((backend, output, place, f"{error:.2g}", f"{allowed:.2g}", verdict))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def compare(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Comparison:
    """Runs one call on each back-end that works here, and compares the results with the reference.

    The reference of a public function is the function of the same name in ``d3s_kernels.reference``, in plain PyTorch
    and float64. The reference of an op is plain PyTorch on the CPU. If an argument requires a gradient, gradients are
    compared too; the incoming gradients are normally distributed random numbers. A function that draws random numbers
    draws the same numbers on every back-end and in the reference. The arguments are not changed.

    Args:
        function: a public function of ``d3s_kernels`` that takes tensors, such as ``d3s_kernels.topk_mask``; or an op
            of the library, such as ``torch.ops.d3s_kernels.topk_order_keys``.
        args, kwargs: the arguments of the call. If they are on a GPU, the compiled CPU library also runs, on a copy of
            the arguments.

    Returns:
        :class:`Comparison`: a :class:`Difference` for each result of each back-end.

    Raises:
        TypeError: the function does not belong to the library, or one of the arguments is a process group.
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
    arguments = _arguments_of(call, args, kwargs)
    device = _device_of(arguments)
    places = [(backend, device) for backend in backends.runnable(device.type)]
    if device != _CPU and "cpu" in backends.runnable("cpu"):
        places.append(("cpu", _CPU))
    found, refusals = Comparison(), []
    for backend, place in places:
        # The reference of a public function runs on the device of the call, so that the reference and the back-end draw
        # the same random numbers. The exact results of an op are computed on the CPU.
        home = _CPU if isinstance(call, torch._ops.OpOverload) else place
        try:
            with backends.forced(backend):
                found += compare_here(row, call, moved(arguments, home), place, backend)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            refusals.append(error)
            found.append(Difference(backend, f"{type(error).__name__}: {error}", None, math.inf, 0.0))
    if refusals and len(refusals) == len(found):  # every back-end refuses these arguments
        raise refusals[0]
    return found


def row_of(function: Any) -> tuple[Row, Callable[..., Any]]:
    """Returns the :class:`Row` of a public function or an op, and the callable that computes it. Refuses an op that
    needs a process group.
    """
    name = getattr(function, "__name__", "")
    if name in FUNCTIONS and public(name) is function:
        return FUNCTIONS[name], function
    schema: Any = getattr(getattr(function, "default", function), "_schema", None)
    namespace, _, op = schema.name.partition("::") if schema else ("", "", "")
    arguments = schema.arguments if schema else ()
    needs_group = any(argument.name == "group_name" and not argument.has_default_value() for argument in arguments)
    if namespace == "d3s_kernels" and not needs_group:
        return row_of_op(op), getattr(torch.ops.d3s_kernels, op).default
    raise TypeError(
        f"function: got {getattr(function, '__qualname__', function)!r}; takes an op of torch.ops.d3s_kernels that "
        f"needs no process group, or a function of d3s_kernels: {', '.join(FUNCTIONS)}"
    )


def public(name: str) -> Callable[..., Any]:
    """Returns the public function with this name, which must be in ``FUNCTIONS``."""
    modules = (importance_ratio, select_rollouts, select_tokens, logprob_entropy, token_logprobs, topk_logprobs)
    function: Callable[..., Any] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return function


def _arguments_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, in the form that back-ends take. Refuses a process group."""
    if isinstance(function, torch._ops.OpOverload):
        names = [argument.name for argument in function._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        require_plain(**arguments)
        return arguments
    arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    for name in ("process_group", "equal_rows"):
        if arguments.get(name):
            raise TypeError(f"{name}: got one; takes none: what is compared is computed by one process")
    for name in ("process_group", "equal_rows", "placement"):
        arguments.pop(name, None)
    require_plain(**arguments)
    # The public functions make the same conversions before they call an op.
    if isinstance(arguments.get("mask"), Tensor):
        arguments["mask"] = as_bool("mask", arguments["mask"])
    if isinstance(arguments.get("hidden"), Tensor) and isinstance(arguments.get("weight"), Tensor):
        arguments["hidden"], arguments["weight"], arguments["bias"] = operands(
            arguments["hidden"], arguments["weight"], arguments.get("bias"), arguments.get("weight_grad_into")
        )
    return arguments


def compare_here(
    row: Row, call: Callable[..., Any], arguments: Mapping[str, Any], device: torch.device, backend: str
) -> list[Difference]:
    """Compares the results of the active back-end on ``device`` with the row's exact results. The exact results are
    computed on the device of ``arguments``. The call on the back-end and the exact computation each get copies, so that
    tensors in ``arguments`` are never written.
    """
    home = _device_of(arguments, device)
    leaves = [name for name in row.gradients if isinstance(part := arguments.get(name), Tensor) and part.requires_grad]
    args, exact_args = moved(arguments, device), moved(arguments, home)
    exact_args |= {name: arguments[name].detach().double().requires_grad_() for name in leaves}
    found = dict(zip(row.results, called(call, args), strict=True))
    if row.from_found:
        exact_args["found"] = {name: result.to(home) for name, result in found.items() if result is not None}
    exact = dict(zip(row.results, called(row.means, exact_args), strict=True))
    rules, known = dict(row.results), dict(arguments)
    with_gradient = [name for name, result in found.items() if leaves and result.requires_grad]
    if with_gradient:
        generator = torch.Generator().manual_seed(_SEED)
        for name in with_gradient:  # the allowed errors depend on the incoming gradients too
            known[f"grad_{name}"] = torch.randn(found[name].shape, generator=generator).to(home)
        for results, inputs in ((found, args), (exact, exact_args)):
            incoming = [known[f"grad_{name}"].to(results[name]) for name in with_gradient]
            outputs = [results[name] for name in with_gradient]
            gradients = torch.autograd.grad(outputs, [inputs[name] for name in leaves], incoming)
            results.update(zip((f"gradient of {name}" for name in leaves), gradients, strict=True))
        rules |= {f"gradient of {name}": row.gradients[name] for name in leaves}
    differences = []
    for name, rule in rules.items():
        if exact[name] is not None:
            wanted = exact[name].detach()
            differences.append(_worst(backend, name, found[name].detach().to(home), wanted, rule(wanted, known)))
    return differences


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Calls a function or an op with a fixed seed. Returns one tuple: the tensors that the op writes to, and then the
    results.
    """
    devices = {part.device for part in arguments.values() if isinstance(part, Tensor) and part.is_cuda}
    # On a CPU, torch.manual_seed is not used, because it is slow: it formats the call stack once for each kind of
    # device that is missing.
    seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices), torch.enable_grad():
        seed(_SEED)
        results = function(**arguments)
    if results is None or isinstance(results, Tensor):
        results = () if results is None else (results,)
    schema = getattr(function, "_schema", None)  # a Python function has no schema, and writes to no argument
    written = () if schema is None else written_arguments(schema.name.partition("::")[2])
    return (*(arguments.get(name) for name in written), *results)


def _worst(backend: str, name: str, found: Tensor, exact: Tensor, allowed: Tensor) -> Difference:
    if found.shape != exact.shape or (not exact.dtype.is_floating_point and found.dtype != exact.dtype):
        was = f"{name}: {found.dtype} {list(found.shape)}, not {exact.dtype} {list(exact.shape)}"
        return Difference(backend, was, (), math.inf, 0.0)
    if found.numel() == 0:
        return Difference(backend, name, None, 0.0, 0.0)
    exact = exact.to(found.dtype).double()  # values beyond the range of the dtype become infinite
    found, limit = found.double(), allowed.double().expand(exact.shape)
    error = (found - exact).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    error = error.masked_fill((found == exact) | (found.isnan() & exact.isnan()), 0)
    # The error of each element as a share of its limit. Elements beyond their limit rank above all others. Of these,
    # elements with a limit of 0 rank highest.
    share = error / limit.clamp(min=1e-300)
    share = torch.where(error <= limit, share, 2 + share).nan_to_num(posinf=torch.finfo(torch.float64).max)
    index = tuple(int(part) for part in torch.unravel_index(share.argmax(), found.shape))
    return Difference(backend, name, index, float(error[index]), float(limit[index]))


# ---- copies ----------------------------------------------------------------------------------------------------------


def _device_of(arguments: Mapping[str, Any], otherwise: torch.device = _CPU) -> torch.device:
    return next((part.device for part in arguments.values() if isinstance(part, Tensor)), otherwise)


def moved(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies the arguments to the device. The copies have the same strides and storage offsets, and thus the same
    alignment to 16 bytes.
    """
    copies = dict(arguments)
    for name, part in arguments.items():
        if isinstance(part, Tensor):
            copies[name] = copied(part, device)
        elif isinstance(part, SamplingMask):
            copies[name] = SamplingMask(copied(part.token_ids, device), copied(part.offsets, device))
        elif isinstance(part, torch.Generator):
            copies[name] = torch.Generator(device).manual_seed(part.initial_seed())
            if part.device.type == device.type:
                copies[name].set_state(part.get_state())
    return copies


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach().untyped_storage())
    copy = whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.detach().requires_grad_(tensor.requires_grad)
