"""max_variance_select: the k values of each segment that have the largest variance."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from cases.draw import draws
from helpers import DTYPES, assert_identical, cut, slow_elsewhere, unwritten
from torch import Tensor

from d3s_kernels import max_variance_select, reference


def check(values: Tensor, keep: int | Tensor, **options: object) -> None:
    with unwritten(values, *(part for part in (keep, *options.values()) if isinstance(part, Tensor))):
        found = max_variance_select(values, keep, **options)
    assert_identical(found, reference.max_variance_select(values, keep, **options))


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


def test_no_subset_has_a_larger_variance() -> None:
    for draw in draws():
        values = draw.values((draw.integer(1, 12),), dtypes=(torch.float32,), special=()).mul(draw.choice((1, 300)))
        k = draw.integer(1, len(values))
        chosen = chosen_of(values.tolist(), k)
        assert len(chosen) == k
        best = largest_variance(values.tolist(), k)
        assert np.var(values[chosen].double().numpy()) >= best * (1 - 1e-9) - 1e-18


def test_ties_of_whole_numbers() -> None:
    """Rewards often have few distinct values, so many splits tie. The rule decides between them, not rounding."""
    for draw in draws():
        values = [float(draw.integer(-3, 3)) for _ in range(draw.integer(1, 14))]
        keep = draw.integer(1, len(values))
        assert chosen_of(values, keep) == exact_choice(values, keep)


@pytest.mark.parametrize("keep", [3, 5, 7, 9, 11])
def test_ties_of_two_rewards(keep: int) -> None:
    """With two distinct values, m from the top tie with k - m. Rounding may make either look better by a last digit."""
    for _ in range(60):
        values = torch.randn(2)[(torch.rand(13) < 0.5).long()].tolist()
        assert chosen_of(values, keep) == exact_choice(values, keep)


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


# ---- sizes and layouts -----------------------------------------------------------------------------------------------


# On both sides of the length from which the CPU kernel uses a radix sort; cuda_shim/kernels.py has those of a GPU.
LONG = [1023, 1024, 1025, slow_elsewhere(65_536, shows="a long segment, as on a CPU")]


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
