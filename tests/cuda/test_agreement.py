"""Each back-end on a GPU, compared with the reference."""

from __future__ import annotations

import pytest
import torch
from cases.coverage import served_by
from cases.draw import Draw
from cases.table import OPS
from every_op import GPU, size

from d3s_kernels.check.compare import compare_here

# Draws, by the largest length of a row or a segment: one block, several blocks, and more than a block's memory holds.
SIZES = {40: size(20, 4), 5000: size(5, 1), 100_000: size(1, 0)}


@pytest.mark.parametrize("op", sorted(served_by("kernels", "composed")))
def test_every_op_means_what_the_table_says(op: str, backend: str) -> None:
    function = getattr(torch.ops.d3s_kernels, op).default
    for most, draws in SIZES.items():
        for seed in range(draws):
            arguments = OPS[op].draw(Draw(seed, most=most))
            for difference in compare_here(OPS[op], function, arguments, GPU, backend):
                assert difference.agrees, (seed, most, difference)
