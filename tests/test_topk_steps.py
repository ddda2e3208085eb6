"""Top-K selection in steps: topk_order_keys, topk_count_digit, topk_choose_digit_ and topk_mask_from_key.

On long pieces, here one after the other in one process, they give the result of topk_mask on the whole. The table has
each step by itself; test_across_ranks.py has them on ranks.
"""

from __future__ import annotations

import pytest
import torch
from helpers import assert_identical
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.distributed.tokens import digits_for

OPS = torch.ops.d3s_kernels


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


def scores_of(n: int, kind: str) -> Tensor:
    return torch.randn(n).round() if kind == "ties" else torch.randn(n)


@pytest.mark.simd
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("n", [16_383, 16_384, 16_385, 65_537, 131_071, 131_072, 200_001])
def test_long_segments(n: int, kind: str) -> None:
    """Lengths on both sides of those at which threads and blocks share a segment; a short one is before and after."""
    scores = scores_of(n + 30, kind)
    offsets = torch.tensor([0, 10, 10, n + 10, n + 30])
    expected = d3s.topk_mask(scores, 0.3, offsets=offsets)
    masks, _, _ = select([OPS.topk_order_keys(scores)], [offsets], digits_for(1), ratio=0.3)
    assert_identical(masks[0], expected)
    cut = n // 3
    both = [OPS.topk_order_keys(scores[:cut]), OPS.topk_order_keys(scores[cut:])]
    masks, _, _ = select(both, [None, None], digits_for(1), ratio=torch.tensor(0.25).item())
    assert_identical(torch.cat(masks), d3s.topk_mask(scores, 0.25))


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
