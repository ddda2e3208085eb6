"""Exactly k of each segment, for segments that lie on several ranks: topk_mask and select_tokens.

The k-th largest key of all ranks is found digit by digit: each rank counts its keys by their digit, among those that
have the digits found before, and the counts are added up. That says which keys are kept, but for ties, which go to the
lower rank: each rank has to know how many the ranks before it have. So what travels are counts, whatever the number of
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import ops
from .._groups import Ranks
from .._segments.order_key import order_key_value
from .._segments.quota import Quota

_MOST = 2**31 - 1  # that an int32 holds

# (shift, bits) of each digit. A few segments take three rounds of 16 KB each for every one of them; many take four
# rounds of 2 KB, since then the bytes count and not the rounds.
FEW_SEGMENTS = 16
_LONG_DIGITS = (21, 11), (10, 11), (0, 10)
_SHORT_DIGITS = (24, 8), (16, 8), (8, 8), (0, 8)

# Up to so many ranks have their counts of a few segments gathered, not added up on the way: that takes no longer, and
# whoever has everyone's counts of the last digit knows everyone's ties. More ranks take one more round to tell them.
FEW_RANKS = 8


class Kept(NamedTuple):
    mask: Tensor  # the shape of the keys
    # int32: of each segment on all ranks, or the most that an int32 holds.
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    threshold: Tensor  # float32: the lowest kept score, infinite where none is kept


def digits_for(segments: int) -> tuple[tuple[int, int], ...]:
    return _LONG_DIGITS if segments <= FEW_SEGMENTS else _SHORT_DIGITS


def select(keys: Tensor, offsets: Tensor | None, quota: Quota, drop_zeros: bool, ranks: Ranks) -> Kept:
    """Of the segments of all ranks' keys: the rows, or what each rank's own offsets say is its piece of them."""
    search, ties = _find(keys, offsets, quota, ranks)
    mask, zeros, lowest = ops.topk_mask_from_key(keys, search, ties, offsets, drop_zeros)
    found, _, count = search.unbind(1)
    if drop_zeros:
        everyones = ranks.gather(torch.stack([zeros, lowest]))
        count = count - everyones[:, 0].sum(0)
        found = everyones[:, 1].amin(0)
    return Kept(mask, count.clamp(max=_MOST).int(), torch.where(count > 0, order_key_value(found), torch.inf))


def gathers_counts(segments: int, ranks: int) -> bool:
    return ranks <= FEW_RANKS and segments <= FEW_SEGMENTS


def _find(keys: Tensor, offsets: Tensor | None, quota: Quota, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The search of each segment, at its end, and how many of the ties this rank keeps."""
    segments = keys.shape[:-1].numel() if offsets is None else offsets.shape[0] - 1
    gathers = gathers_counts(segments, ranks.size)
    search = torch.zeros(segments, 3, dtype=torch.int64, device=keys.device)
    for shift, bits in digits_for(segments):
        counts = ops.topk_count_digit(keys, search, shift, bits, offsets)
        everyones = ranks.gather(counts) if gathers else None
        total = ranks.add_(counts.clone()) if everyones is None else everyones.sum(0)
        ops.topk_choose_digit_(search, total, shift, *quota)
    last_digit = search[:, :1] & (counts.shape[1] - 1)
    if everyones is None:
        everyones = ranks.gather(counts.gather(1, last_digit))
        last_digit = torch.zeros_like(last_digit)
    before = everyones[: ranks.rank].sum(0).gather(1, last_digit).squeeze(1)
    return search, (search[:, 1] - before).clamp(min=0)
