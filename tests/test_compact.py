"""compact: the indices of a mask's true values, in a tensor whose size is known beforehand."""

import pytest
import torch
from helpers import assert_identical, leading_shapes, random_generator, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d3s_kernels import compact, reference


def check(mask: Tensor, capacity: int) -> None:
    for found, expected in zip(compact(mask, capacity), reference.compact(mask, capacity), strict=True):
        assert_identical(found, expected)


@given(leading_shapes, st.integers(0, 40), st.integers(0, 100), st.floats(0, 1), seeds)
def test_any_mask(leading: tuple[int, ...], width: int, capacity: int, share: float, seed: int) -> None:
    check(torch.rand(*leading, width, generator=random_generator(seed)) < share, capacity)


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 300_000])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_long_masks(n: int, share: float) -> None:
    """Lengths on both sides of a piece of the parallel loop, and capacities ending in the first and the last piece."""
    mask = torch.rand(n) < share
    for capacity in (0, 1, int(mask.sum()), n + 5, 1000):
        check(mask, capacity)


def test_the_count_is_true_beyond_the_capacity() -> None:
    indices, count = compact(torch.ones(2, 5, dtype=torch.bool), 4)
    assert indices.tolist() == [0, 1, 2, 3]
    assert count.tolist() == [10]


def test_it_gathers_the_chosen_rows() -> None:
    rows, mask = torch.randn(3, 7, 2), torch.rand(3, 7) < 0.5
    indices, count = compact(mask, 21)
    assert_identical(rows.flatten(0, 1)[indices[: count.item()]], rows[mask])


def test_order_is_that_of_the_rows_whatever_the_strides() -> None:
    mask = torch.rand(8, 9) < 0.4
    check(mask.T, 50)
    check(mask[:, ::2], 50)
    check(mask[:1].expand(4, 9), 50)


def test_a_0d_mask() -> None:
    check(torch.tensor(True), 2)
