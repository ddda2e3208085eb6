"""The rows of the table of ops. For each op, a file of this folder has a function that draws the op's arguments, whose
decorator says how the exact results are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from d3s_kernels._dispatch.libraries import argument_names
from d3s_kernels.check import tolerances
from d3s_kernels.check.tolerances import Allowed, equal

from .draw import Draw

Arguments = dict[str, Any]
DrawArguments = Callable[[Draw], Arguments]
ServedBy = Literal["kernels", "composed", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Row(tolerances.Row):
    """A row of the table: an op or a public function.

    Attributes:
        draw: draws the arguments of a valid call; returns a dictionary with their names.
        served_by: what computes the op. "kernels": each back-end has a kernel; "composed": code that calls other ops,
            on every device; "cpu": only the CPU has a kernel.
    """

    draw: DrawArguments
    served_by: ServedBy = "kernels"


OPS: dict[str, Row] = {}


def op(
    means: Callable[..., Any],
    *equals: str,
    results: Mapping[str, Allowed] | None = None,
    gradients: Mapping[str, Allowed] | None = None,
    from_found: bool = False,
    served_by: ServedBy = "kernels",
) -> Callable[[DrawArguments], DrawArguments]:
    """A decorator for a function that draws an op's arguments. It puts the op with the function's name into the table.

    ``means`` computes the exact results from the same arguments. ``equals`` names the results that must equal them; the
    op returns them after those in ``results``. The others are the attributes of :class:`Row`.
    """

    def add(draw_some: DrawArguments) -> DrawArguments:
        name = draw_some.__name__
        OPS[name] = Row(
            means=means,
            results={**(results or {}), **dict.fromkeys(equals, equal)},
            gradients=gradients or {},
            from_found=from_found,
            draw=partial(_drawn_for, name, draw_some),
            served_by=served_by,
        )
        return draw_some

    return add


def _drawn_for(name: str, draw_some: DrawArguments, draw: Draw) -> Arguments:
    """Only the arguments that the op takes: several ops may share a function that draws more."""
    takes = argument_names(name)
    return {argument: part for argument, part in draw_some(draw).items() if argument in takes}


def detached(given: Arguments) -> Arguments:
    return {name: part.detach() if isinstance(part, Tensor) else part for name, part in given.items()}


def differentiable(draw: Draw, arguments: Arguments, *names: str) -> Arguments:
    """Sometimes the named tensors require a gradient; none with NaN or +inf does, as the gradient would be NaN."""
    for name in names:
        tensor = arguments.get(name)
        if tensor is not None and not (tensor.isnan() | (tensor == math.inf)).any():
            tensor.requires_grad_(draw.flag())
    return arguments
