"""compact: the indices of a mask's true values, in a tensor whose size is known beforehand."""

import pytest
import torch
from helpers import assert_identical
from torch import Tensor

from d3s_kernels import compact, reference


def check(mask: Tensor, capacity: int) -> None:
    for found, expected in zip(compact(mask, capacity), reference.compact(mask, capacity), strict=True):
        assert_identical(found, expected)


@pytest.mark.slow_elsewhere("pieces of the CPU kernel; cuda_shim/kernels.py has those of a GPU")
@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 300_000])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_long_masks(n: int, share: float) -> None:
    """Lengths on both sides of a piece of the parallel loop, and capacities ending in the first and the last piece."""
    mask = torch.rand(n) < share
    for capacity in (0, 1, int(mask.sum()), n + 5, 1000):
        check(mask, capacity)


def test_a_0d_mask() -> None:
    check(torch.tensor(True), 2)
