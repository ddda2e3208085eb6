"""The checks of ``d3s doctor``: every op of the table, on random arguments, is compared with its meaning."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._table.draw import Draw
from ._table.table import OPS
from .compare import Difference, compare_here, moved

# The largest length of a row or a segment, for each draw of an op's arguments. Short lengths test edge cases; the
# longest rows are shared by several blocks of a GPU.
SIZES = (40, 40, 40, 300, 5000)


def checks(device: torch.device, backend: str) -> Iterator[tuple[str, Difference]]:
    """For each op that one device runs alone, the difference with the largest share of its allowed error."""
    for op, row in OPS.items():
        if row.served_by == "ranks" or (row.served_by == "cpu" and device.type != "cpu"):
            continue
        call, found = getattr(torch.ops.d3s_kernels, op).default, []
        for seed, most in enumerate(SIZES):  # the same arguments in every report
            arguments = row.draw(Draw(seed, most=most))
            found += compare_here(row, call, arguments, moved(arguments, device), backend)
        yield op, max(found, key=lambda difference: difference.share)
