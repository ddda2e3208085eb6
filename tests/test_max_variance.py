"""max_variance_select: the k values of each segment that have the largest variance."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import DTYPES, INF, NAN, Segmented, assert_identical, awkward, cut, repetitive, segmented, unwritten
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d3s_kernels import max_variance_select, reference


def check(values: Tensor, keep: int | Tensor, **options: object) -> None:
    expected = reference.max_variance_select(values, keep, **options)
    assert_identical(max_variance_select(values, keep, **options), expected)


def largest_variance(values: list[float], k: int) -> float:
    """The largest variance of all subsets of k values."""
    subsets = np.array(list(combinations(values, k)), dtype=np.float64)
    return subsets.var(axis=1).max().item()


def exact_choice(values: list[float], k: int) -> list[int]:
    """The rule as documented, in fractions: nothing is rounded, so ties are exact."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    splits = [order[:low] + order[len(order) - (k - low) :] for low in range(k + 1)]

    def spread(split: list[int]) -> Fraction:
        chosen = [Fraction(values[i]) for i in split]
        return sum(x * x for x in chosen) - sum(chosen) ** 2 / k

    best = max(map(spread, splits))
    return sorted([split for split in splits if spread(split) == best][-1])  # the last: the fewest from the top


def chosen_of(values: list[float], k: int) -> list[int]:
    return max_variance_select(torch.tensor(values), k).nonzero().flatten().tolist()


# ---- what is best ----------------------------------------------------------------------------------------------------

moderate = st.floats(-1000, 1000, width=32, allow_subnormal=False)
small_groups = st.lists(repetitive | moderate, min_size=1, max_size=12) | st.lists(moderate, min_size=1, max_size=12)


@given(small_groups, st.integers(1, 12))
def test_no_subset_has_a_larger_variance(values: list[float], keep: int) -> None:
    chosen = chosen_of(values, keep)
    k = min(keep, len(values))
    assert len(chosen) == k
    best = largest_variance(values, k)
    assert np.var([values[i] for i in chosen]) >= best * (1 - 1e-9) - 1e-18


@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=14), st.integers(1, 13))
def test_ties_of_whole_numbers(values: list[float], keep: int) -> None:
    """Rewards often have few distinct values, so many splits tie. The rule decides between them, not rounding."""
    assert chosen_of(values, keep) == exact_choice(values, min(keep, len(values)))


@pytest.mark.parametrize("keep", [3, 5, 7, 9, 11])
def test_ties_of_two_rewards(keep: int) -> None:
    """With two distinct values, m from the top tie with k - m. Rounding may make either look better by a last digit."""
    for _ in range(60):
        values = torch.randn(2)[(torch.rand(13) < 0.5).long()].tolist()
        assert chosen_of(values, keep) == exact_choice(values, keep)


@given(segmented(awkward), st.integers(1, 14), st.sampled_from([None, torch.int32, torch.int64]))
def test_any_segments(case: Segmented, keep: int, keep_dtype: torch.dtype | None) -> None:
    given_keep = keep if keep_dtype is None else torch.tensor(keep, dtype=keep_dtype)
    check(case.values, given_keep, offsets=case.offsets, mask=case.mask)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("binary", [True, False])
def test_a_standardised_group_has_a_subset_of_variance_one(ddof: int, binary: bool) -> None:
    """Lemma 1 of D3S, for every size m >= 2, with the sample variance of the subset: its mean over all subsets of size
    m is the variance of the group. (With the population variance this fails for odd m.)"""
    for n in (2, 3, 6, 8, 17):
        values = torch.randint(2, (n,)).double() if binary else torch.randn(n).double()
        if values.var() == 0:
            continue
        standardised = ((values - values.mean()) / values.std(correction=ddof)).float()
        for m in range(2, n + 1):
            chosen = standardised[max_variance_select(standardised, m)]
            wanted = 1.0 if ddof == 1 else n / (n - 1)
            assert chosen.double().var() >= wanted * (1 - 1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 8, 15])
def test_binary_rewards(k: int) -> None:
    """Half comes from each side, and an odd one from below (PODS, Theorem 2)."""
    for ones in range(17):
        rewards = torch.zeros(16)
        rewards[torch.randperm(16)[:ones]] = 1.0
        from_top = min(ones, max(k // 2, k - (16 - ones)))
        assert rewards[max_variance_select(rewards, k)].sum() == from_top


@pytest.mark.parametrize("offset", [1e3, -1e4, 2.0**24 - 2])  # float32 has no larger odd integers
def test_a_constant_changes_nothing(offset: float) -> None:
    """Far from 0, sums of squares have no digits left for small differences, even in float64."""
    values = torch.randint(0, 3, (20, 40)).float()
    for keep in range(1, 20):
        assert_identical(max_variance_select(values + offset, keep), max_variance_select(values, keep))


@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_small_differences_far_from_zero(offset: float) -> None:
    values = torch.randn(20, 64) / 100 + offset
    chosen = max_variance_select(values, 16)
    assert_identical(chosen, reference.max_variance_select(values, 16))
    ordered = values.double().sort(-1).values
    splits = [torch.cat([ordered[:, :low], ordered[:, low + 48 :]], -1) for low in range(17)]
    best = torch.stack([split.var(-1) for split in splits]).amax(0)
    torch.testing.assert_close(values.double()[chosen].view(20, 16).var(-1), best, rtol=1e-9, atol=0)


# ---- ties ------------------------------------------------------------------------------------------------------------


def test_equal_values_keep_the_first() -> None:
    """Every split has variance 0, so the rule takes the split with no value from the top."""
    for k in (1, 3, 6):
        assert chosen_of([0.25] * 7, k) == list(range(k))


def test_one_of_many_is_the_lowest() -> None:
    """Any single value has variance 0, so the lowest one is kept."""
    assert chosen_of([3.0, 1.0, 2.0, 1.0], 1) == [1]


def test_order_is_by_value_and_index() -> None:
    """The first of equal values is taken from below, and the last from above. -0 equals 0."""
    assert chosen_of([0.0, 1.0, -0.0, 1.0, 0.0, 1.0], 2) == [0, 5]
    assert chosen_of([1.0, -0.0, 0.0, 1.0, 0.5], 4) == [0, 1, 2, 3]


# ---- what counts -----------------------------------------------------------------------------------------------------


def test_no_more_than_keep_keeps_all_that_are_usable() -> None:
    values = torch.tensor([[1.0, NAN, 2.0, INF], [1.0, -INF, 1.0, 3.0]])
    mask = torch.tensor([[True] * 4, [True, True, False, True]])
    expected = torch.tensor([[True, False, True, False], [True, False, False, True]])
    for keep in (2, 3, 100):
        assert_identical(max_variance_select(values, keep, mask=mask), expected)


def test_unusable_values_change_nothing() -> None:
    values = torch.randn(100)
    unusable = torch.rand(100) < 0.4
    expected = torch.zeros(100, dtype=torch.bool)
    expected[~unusable] = max_variance_select(values[~unusable], 10)
    assert_identical(max_variance_select(values, 10, mask=~unusable), expected)
    for value in (NAN, INF, -INF):
        assert_identical(max_variance_select(values.masked_fill(unusable, value), 10), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_no_values(shape: tuple[int, ...]) -> None:
    assert max_variance_select(torch.empty(shape), 3).shape == shape


# ---- sizes and layouts -----------------------------------------------------------------------------------------------


LONG = [1023, 1024, 1025, 65_536]  # on both sides of the length from which the CPU kernel uses a radix sort


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("kind", ["normal", "few values"])
def test_long_segments(n: int, kind: str) -> None:
    values = torch.randn(n) if kind == "normal" else torch.randint(-3, 4, (n,)).float()
    for keep in (1, 17, n // 4, n - 1, n):
        check(values, keep)


@pytest.mark.parametrize("n", LONG)
def test_long_segments_of_values_of_any_size(n: int) -> None:
    """Values over 70 decades have splits of every quality. Once in some sixty draws one lies within rounding of the
    limit, 1e-12 below the best, so that another order of the sums chooses another one; hence a hundredth of the limit.
    """
    values = torch.randn(n) * 10.0 ** torch.randint(-40, 30, (n,))
    order = values.argsort(stable=True)

    def number_low(mask: Tensor) -> int:
        return int(mask[order].long().cumprod(0).sum())

    for keep in (1, 17, n // 4, n - 1, n):
        found = max_variance_select(values, keep)
        low = number_low(found)
        assert_identical(found[order], (torch.arange(n) < low) | (torch.arange(n) >= n - (keep - low)))
        fewest, most = (
            number_low(reference._most_varied(values.double(), values.isfinite(), keep, equal))
            for equal in (0.99e-12, 1.01e-12)
        )
        assert fewest <= low <= most


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_groups(dtype: torch.dtype) -> None:
    check(torch.randn(1000, 64).to(dtype), 16)
    check(torch.randn(20_000).to(dtype), 16, offsets=cut(20_000, 300), mask=torch.rand(20_000) < 0.9)


def test_layouts_agree() -> None:
    values, mask = torch.randint(5, (6, 16)).float(), torch.rand(6, 16) < 0.8
    expected = max_variance_select(values, 4, mask=mask)
    offsets = torch.arange(0, 97, 16, dtype=torch.int32)
    flat = max_variance_select(values.flatten(), 4, mask=mask.flatten(), offsets=offsets, max_segment=16)
    assert_identical(flat.view(6, 16), expected)
    assert_identical(max_variance_select(values.T.contiguous().T, 4, mask=mask.T.contiguous().T), expected)
    rows = [max_variance_select(row, 4, mask=usable) for row, usable in zip(values, mask, strict=True)]
    assert_identical(torch.stack(rows), expected)


def test_the_inputs_are_not_written() -> None:
    values, mask = torch.randn(3, 20), torch.rand(3, 20) < 0.7
    with unwritten(values, mask):
        max_variance_select(values, 5, mask=mask)


def test_a_mask_has_no_gradient() -> None:
    assert not max_variance_select(torch.randn(10, requires_grad=True), 5).requires_grad
