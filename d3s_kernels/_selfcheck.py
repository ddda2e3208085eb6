"""The checks of ``d3s doctor``: every op of the table, on random arguments, is compared with its meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ._table.draw import Draw
from ._table.table import OPS, Row
from .compare import Difference, compare_here, moved

# The largest length of a row or a segment, for each draw of an op's arguments. Short lengths test edge cases; the
# longest rows are shared by several blocks of a GPU.
SIZES = (40, 40, 40, 300, 5000)


def checks(device: torch.device, backend: str) -> Iterator[tuple[str, Difference]]:
    """For each op that one device runs alone, the difference with the largest share of its allowed error. Where one is
    wrong, its first one, with the draw that gave it; or the exception. After a fault of the device no op runs.
    """
    failed = None
    for op, row in OPS.items():
        if row.served_by == "ranks" or (row.served_by == "cpu" and device.type != "cpu"):
            continue
        if failed:
            yield op, _nothing(backend, f"not run: {failed}")
            continue
        worst = _worst(op, row, device, backend)
        yield op, worst
        if raised(worst) and not _works(device):
            failed = f"the device failed at {op}"


def raised(worst: Difference) -> bool:
    """Whether there is no result to compare."""
    return worst.index is None and worst.error == math.inf


def _nothing(backend: str, why: str) -> Difference:
    return Difference(backend, why, None, math.inf, 0.0)


def _worst(op: str, row: Row, device: torch.device, backend: str) -> Difference:
    call, found = getattr(torch.ops.d3s_kernels, op).default, []
    for seed, most in enumerate(SIZES):  # the same arguments in every report
        arguments = row.draw(Draw(seed, most=most))
        try:
            differences = compare_here(row, call, arguments, moved(arguments, device), backend)
        except Exception as fault:  # of a kernel, a driver or a compiler
            said = next(iter(str(fault).splitlines()), "")
            return _nothing(backend, f"{type(fault).__name__} of Draw({seed}, most={most}): {said}")
        for difference in differences:
            if not difference.agrees:
                return difference._replace(output=f"{difference.output} of Draw({seed}, most={most})")
        found += differences
    return max(found, key=lambda difference: difference.share)


def _works(device: torch.device) -> bool:
    """Whether the device still computes: after a fault of a kernel no call on it works."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except Exception:
        return False
