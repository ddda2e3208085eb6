"""Top-K selection in steps: topk_order_keys, topk_count_digit, topk_choose_digit_ and topk_mask_from_key.

On the pieces of several ranks, here one after the other in one process, they give the result of topk_mask on the whole.
"""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, assert_identical, dtypes, random_generator, seeds
from hypothesis import given
from hypothesis import strategies as st
from ranks import pieces_of
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.distributed.tokens import FEW_SEGMENTS, digits_for

OPS = torch.ops.d3s_kernels
NONE_KEPT = 2**32 - 1
DIGITS = (digits_for(1), digits_for(FEW_SEGMENTS + 1), tuple((shift, 1) for shift in range(31, -1, -1)))


def select(
    pieces: list[Tensor], offsets: list[Tensor | None], digits: tuple, drop_zeros: bool = False, **quota: object
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The masks of all pieces, and for each segment the number of dropped zeros and the lowest kept key."""
    segments = pieces[0].shape[:-1].numel() if offsets[0] is None else len(offsets[0]) - 1
    search = torch.zeros(segments, 3, dtype=torch.int64)
    for shift, bits in digits:
        counts = [
            OPS.topk_count_digit(keys, search, shift, bits, own) for keys, own in zip(pieces, offsets, strict=True)
        ]
        OPS.topk_choose_digit_(search, torch.stack(counts).sum(0), shift, **quota)
    ties = [of_piece.gather(1, search[:, :1] & (of_piece.shape[1] - 1))[:, 0] for of_piece in counts]
    results = []
    before = torch.zeros(segments, dtype=torch.int64)
    for keys, own, more in zip(pieces, offsets, ties, strict=True):
        results.append(OPS.topk_mask_from_key(keys, search, (search[:, 1] - before).clamp(min=0), own, drop_zeros))
        before += more
    masks, zeros, lowest = zip(*results, strict=True)
    return list(masks), torch.stack(zeros).sum(0), torch.stack(lowest).amin(0)


def scores_of(n: int, kind: str, generator: torch.Generator) -> Tensor:
    scores = torch.randn(n, generator=generator)
    if kind == "ties":
        scores = scores.round()
    if kind == "awkward":
        scores = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 1e-42, -3e38])[
            torch.randint(9, (n,), generator=generator)
        ]
    return scores


def side_by_side(parts: list[tuple[Tensor, ...]], dtype: torch.dtype) -> Tensor:
    """Joins the parts by segment: every rank's part of the first segment, then of the second, and so on."""
    return torch.cat([torch.empty(0, dtype=dtype), *(part for segment in zip(*parts, strict=True) for part in segment)])


kinds = st.sampled_from(("normal", "ties", "awkward"))


@given(seeds, kinds, dtypes, st.integers(0, 300), st.integers(1, 4), st.sampled_from(DIGITS), st.booleans())
def test_one_segment(
    seed: int, kind: str, dtype: torch.dtype, n: int, ranks: int, digits: tuple, drop_zeros: bool
) -> None:
    generator = random_generator(seed)
    scores = scores_of(n, kind, generator).to(dtype)
    mask = torch.rand(n, generator=generator) < 0.8
    ratio = 1.0 - float(torch.rand((), generator=generator))
    expected = d3s.topk_mask(scores, ratio, mask=mask, drop_zeros=drop_zeros)
    lengths = pieces_of(n, ranks, generator)
    own = zip(scores.split(lengths), mask.split(lengths), strict=True)
    pieces = [OPS.topk_order_keys(of_rank, None, mask_of_rank) for of_rank, mask_of_rank in own]
    masks, zeros, lowest = select(pieces, [None] * ranks, digits, drop_zeros, ratio=ratio)
    assert_identical(torch.cat(masks), expected)
    kept = d3s.topk_mask(scores, ratio, mask=mask)
    assert int(zeros) == int((kept & ~expected).sum())
    if expected.any():
        least = scores[expected].float().min().view(1)
        assert int(lowest) == int(OPS.topk_order_keys(least)) & 0xFFFFFFFF
    elif not kept.any():
        assert int(lowest) == NONE_KEPT


@given(seeds, kinds, st.integers(0, 300), st.integers(0, 40), st.integers(1, 4), st.sampled_from(DIGITS))
def test_segments_in_pieces(seed: int, kind: str, n: int, segments: int, ranks: int, digits: tuple) -> None:
    """Every rank has a part of every segment. The whole segment is these parts side by side."""
    generator = random_generator(seed)
    lengths = [pieces_of(n // ranks, segments, generator) if segments else [] for _ in range(ranks)]
    pieces = [scores_of(sum(own), kind, generator) for own in lengths]
    parts = [piece.split(own) for piece, own in zip(pieces, lengths, strict=True)]
    whole = side_by_side(parts, torch.float32)
    totals = torch.tensor(lengths, dtype=torch.int64).view(ranks, segments).sum(0)
    expected = d3s.topk_mask(whole, k=3, offsets=torch.cat([torch.zeros(1, dtype=torch.int64), totals.cumsum(0)]))
    offsets = [torch.tensor([0, *own]).cumsum(0).to(torch.int32 if seed % 2 else torch.int64) for own in lengths]
    masks, _, _ = select([OPS.topk_order_keys(piece) for piece in pieces], offsets, digits, k=3)
    found = [mask.split(own) for mask, own in zip(masks, lengths, strict=True)]
    assert_identical(side_by_side(found, torch.bool), expected)


@pytest.mark.simd
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("n", [16_383, 16_384, 16_385, 65_537, 131_071, 131_072, 200_001])
def test_long_segments(n: int, kind: str) -> None:
    """Lengths on both sides of those at which threads and blocks share a segment; a short one is before and after."""
    generator = random_generator(int(torch.randint(2**31, ())))
    scores = scores_of(n + 30, kind, generator)
    offsets = torch.tensor([0, 10, 10, n + 10, n + 30])
    expected = d3s.topk_mask(scores, 0.3, offsets=offsets)
    masks, _, _ = select([OPS.topk_order_keys(scores)], [offsets], digits_for(1), ratio=0.3)
    assert_identical(masks[0], expected)
    cut = n // 3
    both = [OPS.topk_order_keys(scores[:cut]), OPS.topk_order_keys(scores[cut:])]
    masks, _, _ = select(both, [None, None], digits_for(1), ratio=torch.tensor(0.25).item())
    assert_identical(torch.cat(masks), d3s.topk_mask(scores, 0.25))


def test_rows() -> None:
    scores = torch.randn(3, 5, 40).round()
    masks, _, _ = select([OPS.topk_order_keys(scores)], [None], digits_for(15), ratio=0.2)
    assert_identical(masks[0], d3s.topk_mask(scores, 0.2))


@given(seeds, dtypes, st.integers(3, 100))
def test_keys_have_the_order_of_scores(seed: int, dtype: torch.dtype, n: int) -> None:
    generator = random_generator(seed)
    entropy, advantage = torch.rand(n, generator=generator).to(dtype), torch.randn(n, generator=generator)
    score = advantage.abs() * entropy.float()
    keys = OPS.topk_order_keys(entropy, advantage).long() & 0xFFFFFFFF
    assert torch.equal(keys.argsort(stable=True), score.argsort(stable=True))
    of_sequences = OPS.topk_order_keys(entropy, advantage[:2], None, torch.tensor([0, n // 2, n]))
    spread = advantage[:2].repeat_interleave(torch.tensor([n // 2, n - n // 2]))
    assert_identical(of_sequences, OPS.topk_order_keys(entropy, spread))


def test_absent_keys_are_0() -> None:
    scores = torch.tensor([1.0, torch.nan, -torch.inf, 0.0, -0.0])
    keys = OPS.topk_order_keys(scores, None, torch.tensor([False, True, True, True, True]))
    assert (keys == 0).tolist() == [True, True, False, False, False]
    assert keys[3] == keys[4]


def test_nothing_to_keep() -> None:
    for n in (0, 5):
        keys = OPS.topk_order_keys(torch.full((n,), torch.nan))
        masks, zeros, lowest = select([keys], [None], digits_for(1), ratio=0.5)
        assert not masks[0].any()
        assert (int(zeros), int(lowest)) == (0, NONE_KEPT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_segments(dtype: torch.dtype) -> None:
    keys = OPS.topk_order_keys(torch.empty(0, dtype=dtype))
    masks, zeros, lowest = select([keys], [torch.zeros(1, dtype=torch.int64)], digits_for(0), k=2)
    assert masks[0].shape == zeros.shape == lowest.shape == (0,)


SEARCH = torch.zeros(1, 3, dtype=torch.int64)
KEYS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: OPS.topk_order_keys(torch.zeros(3).long()), "scores: got dtype torch.int64"),
        (lambda: OPS.topk_order_keys(torch.zeros(3), torch.zeros(2)), "advantages: got shape"),
        (lambda: OPS.topk_count_digit(KEYS.long(), SEARCH, 21, 11), "keys: got torch.int64"),
        (lambda: OPS.topk_count_digit(KEYS, SEARCH[:, :2], 21, 11), "search: got shape"),
        (lambda: OPS.topk_count_digit(KEYS, SEARCH, 20, 12), "bits: got 12; takes 1 to 11"),
        (lambda: OPS.topk_count_digit(KEYS, SEARCH, 22, 11), "shift: got 22 of 11 bits; takes 0 to 21"),
        (lambda: OPS.topk_choose_digit_(SEARCH, torch.zeros(1, 6).long(), 0, ratio=0.5), "counts: got 6 bins"),
        (lambda: OPS.topk_choose_digit_(SEARCH, torch.zeros(1, 8).long(), 29), "ratio: got 0 of ratio and k"),
        (lambda: OPS.topk_mask_from_key(KEYS, SEARCH, torch.zeros(2).long()), "ties: got shape"),
    ],
)
def test_bad_arguments(call: object, said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        call()  # type: ignore[operator]
