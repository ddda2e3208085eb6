"""Exactly k of each segment, for segments that lie on several ranks: topk_mask and select_tokens.

The k-th largest key of all ranks is found digit by digit: each rank counts its keys by their next digit, among those
that have the digits found so far, and the counts are summed over the ranks. That decides which keys are kept, except
for ties, which go to the lower rank: each rank has to know how many ties the ranks before it have. So the ranks
exchange only counts, whose size does not depend on the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import ops
from .._groups import Ranks
from .._segments.order_key import order_key_value
from .._segments.quota import Quota

_MOST = 2**31 - 1  # the largest int32

# (shift, bits) of each digit. Few segments take three rounds of 16 KB for each segment. Many segments take four rounds
# of 2 KB for each, since then bytes cost more than rounds.
FEW_SEGMENTS = 16
_LONG_DIGITS = (21, 11), (10, 11), (0, 10)
_SHORT_DIGITS = (24, 8), (16, 8), (8, 8), (0, 8)

# Up to this many ranks gather their counts of few segments instead of an all-reduce: that takes no longer, and all
# ranks' counts of the last digit include all ranks' ties. With more ranks, the ties take one more round.
FEW_RANKS = 8


class Kept(NamedTuple):
    mask: Tensor  # the shape of the keys
    # int32: of each segment on all ranks, at most the largest int32.
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    threshold: Tensor  # float32: the lowest kept score, infinite where none is kept


def digits_for(segments: int) -> tuple[tuple[int, int], ...]:
    return _LONG_DIGITS if segments <= FEW_SEGMENTS else _SHORT_DIGITS


def select(keys: Tensor, offsets: Tensor | None, quota: Quota, drop_zeros: bool, ranks: Ranks) -> Kept:
    """Selects from the segments of all ranks' keys. A rank's pieces of them are its rows, or given by its offsets."""
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
    """The finished search of each segment, and how many of the ties this rank keeps."""
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
