"""The results and gradients of a call, the exact ones of its meaning, and how far apart the two may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .table import Row

_SEED = 0  # for calls that draw without a generator, and for the incoming gradients


class Outcome(NamedTuple):
    name: str
    found: Tensor
    exact: Tensor
    allowed: Tensor


def outcomes(
    row: Row, call: Callable[..., Any], arguments: Mapping[str, Any], sent: Mapping[str, Any]
) -> Iterator[Outcome]:
    """Calls the op or function with ``sent``, the arguments on a device, and its meaning with the same ``arguments``.
    Yields an outcome for each of the row's results and gradients.

    The given tensors are never written: the call gets copies.
    """
    found = called(call, {name: _fresh(part) for name, part in sent.items()})
    home = next((part.device for part in arguments.values() if isinstance(part, Tensor)), torch.device("cpu"))
    exact_arguments = {name: _exact(part) for name, part in arguments.items()}
    if row.from_found:
        results = (result.to(home) for result in found.results)
        exact_arguments["found"] = dict(zip(row.results, results, strict=True))
    exact = called(row.means, exact_arguments)
    known = dict(arguments)  # with the incoming gradients, on which allowed errors depend
    leaves = [name for name in row.gradients if isinstance(part := arguments.get(name), Tensor) and part.requires_grad]
    gradients: list[Outcome] = []
    if leaves:
        generator = torch.Generator().manual_seed(_SEED)
        incoming: list[Tensor] = []
        for name, result in zip(row.results, found.results, strict=True):
            drawn = torch.randn(result.shape, generator=generator).to(home)
            if result.requires_grad:
                known[f"grad_{name}"] = drawn
                incoming.append(drawn)
        ours, theirs = (_gradients(side, found.results, leaves, incoming) for side in (found, exact))
        gradients = [
            Outcome(f"gradient of {name}", one.to(home), other, row.gradients[name](other, known))
            for name, one, other in zip(leaves, ours, theirs, strict=True)
        ]
    for (name, rule), ours_of, exact_of in zip(row.results.items(), found.results, exact.results, strict=True):
        if exact_of is not None:
            yield Outcome(name, ours_of.detach().to(home), exact_of.detach(), rule(exact_of.detach(), known))
    yield from gradients


class _Call(NamedTuple):
    arguments: dict[str, Any]
    results: tuple[Any, ...]


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> _Call:
    devices = {part.device for part in arguments.values() if isinstance(part, Tensor) and part.is_cuda}
    # torch.manual_seed would format the stack once for each kind of device that is not there.
    seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices), torch.enable_grad():
        seed(_SEED)
        results = function(**arguments)
    if results is None or isinstance(results, Tensor):
        results = () if results is None else (results,)
    written = written_arguments(function)
    return _Call(arguments, (*(arguments[name] for name in written), *results))


def written_arguments(function: Any) -> tuple[str, ...]:
    """The names of the arguments that an op writes; none for a Python function."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return ()
    return tuple(part.name for part in schema.arguments if part.alias_info is not None and part.alias_info.is_write)


def _fresh(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return _same_generator(part)
    if not isinstance(part, Tensor):
        return part
    return copied(part, part.device)


def _exact(part: Any) -> Any:
    """A tensor that requires a gradient becomes a float64 leaf, so that its gradient is float64."""
    if isinstance(part, Tensor) and part.requires_grad:
        return part.detach().double().requires_grad_()
    return _same_generator(part) if isinstance(part, torch.Generator) else part


def _same_generator(generator: torch.Generator) -> torch.Generator:
    same = torch.Generator(generator.device)
    same.set_state(generator.get_state())
    return same


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides and the same alignment with respect to 16 bytes."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach().untyped_storage())
    copy = whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.detach().requires_grad_(tensor.requires_grad)


def _gradients(side: _Call, like: tuple[Tensor, ...], leaves: list[str], incoming: list[Tensor]) -> tuple[Tensor, ...]:
    asked = [result for result, ours in zip(side.results, like, strict=True) if ours.requires_grad]
    given = [gradient.to(result) for gradient, result in zip(incoming, asked, strict=True)]
    return torch.autograd.grad(asked, [side.arguments[name] for name in leaves], given)
