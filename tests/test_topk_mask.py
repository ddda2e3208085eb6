"""topk_mask: exactly k of each segment, with ties resolved to the lower index. The table draws short segments."""

import pytest
import torch
from helpers import DTYPES, INF, NAN, assert_identical, cut, slow, slow_elsewhere, unwritten
from torch import Tensor

from d3s_kernels import reference, topk_mask


def check(scores: Tensor, *args: object, **options: object) -> None:
    with unwritten(scores, *(part for part in options.values() if isinstance(part, Tensor))):
        chosen = topk_mask(scores, *args, **options)
    assert_identical(chosen, reference.topk_mask(scores, *args, **options))


# ---- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_ratio", [float, torch.tensor, lambda value: torch.tensor(value, dtype=torch.float64)])
@pytest.mark.parametrize("n", [1, 3, 100, 250, 1000])
def test_whole_percents_are_exact(as_ratio, n: int) -> None:
    """7 % of 100 is 7, although 0.07 * 100 is 7.000000000000001 in double."""
    scores = torch.rand(n)
    kept = [int(topk_mask(scores, as_ratio(percent / 100)).sum()) for percent in range(1, 101)]
    assert kept == [-(-percent * n // 100) for percent in range(1, 101)]


def test_k_beyond_the_segment_keeps_all_of_it() -> None:
    scores = torch.tensor([[1.0, NAN, -INF], [0.0, 2.0, 3.0]])
    for k in (10, 2**63 - 1, torch.tensor(2**63 - 1)):
        assert topk_mask(scores, k=k).tolist() == [[True, False, True], [True, True, True]]


@pytest.mark.parametrize("n", [10, 1000, 100_000, 300_000])
def test_equal_scores_keep_the_first(n: int) -> None:
    """With a quantile as threshold, all of them would be kept."""
    chosen = topk_mask(torch.full((n,), 0.25), 0.2)
    assert_identical(chosen, torch.arange(n) < n // 5)


# ---- long segments ---------------------------------------------------------------------------------------------------


def scores_of_kind(kind: str, n: int) -> Tensor:
    place = torch.arange(n)
    return {
        "normal": lambda: torch.randn(n),
        "few values": lambda: torch.randint(3, (n,)).float(),
        "ascending": lambda: place.float(),
        "descending": lambda: -place.float(),
        "mostly zero": lambda: torch.randn(n) * (torch.rand(n) < 0.03),
        "sawtooth": lambda: (place % max(1, n // 1024)).float(),  # any sample with a regular step sees only one value
        "clusters": lambda: torch.randn(n) * 1e-6 + (torch.rand(n) < 0.1),
        "wide": lambda: torch.randn(n) * 10.0 ** torch.randint(-40, 38, (n,)),  # down to subnormal numbers
    }[kind]()


KINDS = ["normal", "few values", "ascending", "descending", "mostly zero", "sawtooth", "clusters", "wide"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "n",
    [
        pytest.param(32_769, marks=pytest.mark.simd),
        *(
            slow_elsewhere(n, shows="lengths at which the CPU kernel alone changes")
            for n in (32_768, 131_071, 131_072, 400_001)
        ),
    ],
)
def test_long_segments(kind: str, n: int) -> None:
    """Lengths on both sides of each one at which the CPU kernel changes its method."""
    scores = scores_of_kind(kind, n)
    scores[torch.randint(n, (n // 100,))] = NAN
    mask = torch.rand(n) < 0.9
    for quota in ({"ratio": 0.05}, {"k": 1}, {"ratio": 0.9, "mask": mask}):
        check(scores, **quota)


@pytest.mark.slow_elsewhere("a guess that the CPU kernel alone makes")
def test_a_wrong_guess_from_a_sample_changes_nothing() -> None:
    """From a sample of 1024 keys, the CPU kernel guesses between which two keys the k-th lies. Here it narrows 400,000
    keys down to ones and twos, and then samples only ones. A wrong guess may cost time, but must not change the
    result."""
    ones_and_twos = torch.cat([torch.full((80_000 - 1024,), 1.0), torch.full((80_000,), 2.0)])
    middle = torch.zeros(160_000)
    step = 160_000 // 1024
    seen = torch.arange(1024) * step + torch.arange(1024) % step
    middle[seen] = 1.0
    middle[middle == 0] = ones_and_twos[torch.randperm(len(ones_and_twos))]
    scores = torch.tensor([0.0, 3.0]).repeat_interleave(120_000)[torch.randperm(240_000)]
    place = torch.randperm(400_000)[:160_000].sort().values
    others = torch.ones(400_000, dtype=torch.bool).index_fill(0, place, False)
    scores = torch.zeros(400_000).masked_scatter(others, scores).index_copy(0, place, middle)
    for ratio in (0.4, 0.49, 0.51, 0.6):
        check(scores, ratio)


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_ragged_segments(dtype: torch.dtype) -> None:
    scores, offsets = torch.randn(200_000).to(dtype), cut(200_000, 700)
    check(scores, 0.1, offsets=offsets, mask=torch.rand(200_000) < 0.8)


def test_long_and_short_segments_together() -> None:
    offsets = torch.tensor([0, 0, 5, 140_005, 140_006, 340_006, 340_100], dtype=torch.int32)
    check(torch.randint(50, (340_100,)).float(), 0.2, offsets=offsets)


@pytest.mark.parametrize("shape", [slow((70_000, 3), shows="more rows than 16 bits count"), (3, 70_000)])
def test_more_than_65535_rows_or_columns(shape: tuple[int, int]) -> None:
    check(torch.randn(shape), 0.2)
