"""Top-K selection in steps, for segments that lie on several ranks: topk_order_keys, topk_count_digit,
topk_choose_digit_, topk_mask_from_key.

``search``, int64 [segments, 3], is the state of the search for the k-th largest key, as in ``KeySearch`` of
csrc/core/key_search.h: the digits of this key that are found so far, the key's rank among all keys that start with
these digits, and k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments.bundles import NOTHING, NumberOrTensor
from .._segments.quota import Quota
from .._segments.segments import (
    ABSENT,
    NO_KEY,
    ZERO_KEY,
    advantage_of_each,
    both,
    order_key,
    segments_of,
    signed,
    unsigned,
)
from .kernels import like, op

_KEY_BITS = 32


@op(like("scores", torch.int32))
def topk_order_keys(
    scores: Tensor, advantages: Tensor | None = None, mask: Tensor | None = None, offsets: Tensor | None = None
) -> Tensor:
    values = scores.flatten().float()
    if advantages is not None:
        values = advantage_of_each(advantages, scores, segments_of(scores, offsets)).abs() * values
    keys = order_key(values).where(both(values == values, mask), ABSENT)
    return signed(keys).view(scores.shape)


@op(lambda keys, search, bits, **_: keys.new_empty((search.shape[0], 1 << bits), dtype=torch.int64))
def topk_count_digit(keys: Tensor, search: Tensor, shift: int, bits: int, offsets: Tensor | None = None) -> Tensor:
    segments, flat, bins = segments_of(keys, offsets), unsigned(keys.flatten()), 1 << bits
    counted = (flat != ABSENT) & ~segments.left_out()
    if shift + bits < _KEY_BITS:
        prefix, k = (segments.spread(part) for part in (search[:, 0], search[:, 2]))
        counted &= (flat >> (shift + bits) == prefix) & (k > 0)
    slot = segments.spread(torch.arange(len(search), device=keys.device)) * bins + (flat >> shift) % bins
    # Keys that are not counted are assigned to an extra bin at the end.
    counts = torch.zeros(len(search) * bins + 1, dtype=torch.int64, device=keys.device)
    slot = torch.where(counted, slot, len(counts) - 1)
    return counts.index_add_(0, slot, counted.long())[:-1].view(len(search), bins)


@op()
def topk_choose_digit_(
    search: Tensor,
    counts: Tensor,
    shift: int,
    ratio: NumberOrTensor = NOTHING,
    k: NumberOrTensor = NOTHING,
) -> None:
    bins = counts.shape[1]
    prefix, left, kept = search.unbind(1)
    if shift + bins.bit_length() - 1 == _KEY_BITS:
        kept = Quota(*ratio, *k).of(counts.sum(1))
        prefix, left = torch.zeros_like(kept), kept
    from_top = counts.flip(1).cumsum(1)  # from_top[i]: how many keys are in the i + 1 highest bins
    place = (from_top < left.unsqueeze(1)).sum(1).clamp(max=bins - 1)
    above = torch.where(place > 0, from_top.gather(1, (place - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0)
    found = torch.stack([prefix * bins + (bins - 1 - place), left - above, kept], 1)
    search.copy_(torch.where(kept.unsqueeze(1) > 0, found, torch.stack([prefix, left, kept], 1)))


def _fake_mask_from_key(keys: Tensor, search: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    zeros, lowest = (keys.new_empty(search.shape[:1], dtype=torch.int64) for _ in range(2))
    return keys.new_empty(keys.shape, dtype=torch.bool), zeros, lowest


@op(_fake_mask_from_key)
def topk_mask_from_key(
    keys: Tensor, search: Tensor, ties: Tensor, offsets: Tensor | None = None, drop_zeros: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    segments, flat = segments_of(keys, offsets), unsigned(keys.flatten())
    found, k, allowed = (segments.spread(part) for part in (search[:, 0], search[:, 2], ties))
    inside = (k > 0) & ~segments.left_out()
    tie = inside & (flat == found)
    so_far = tie.long().cumsum(0)
    number = (
        so_far - pad(so_far, (1, 0))[segments.edges[:-1]][segments.segment_ids]
    )  # the index of a tie among the ties of its segment, counted from 1
    kept = inside & ((flat > found) | (tie & (number <= allowed)))
    dropped = kept & (flat == ZERO_KEY) if drop_zeros else torch.zeros_like(kept)
    kept &= ~dropped
    at = torch.where(kept, segments.spread(torch.arange(len(search), device=keys.device)), len(search))
    lowest = torch.full((len(search) + 1,), NO_KEY, device=keys.device).scatter_reduce_(0, at, flat, "amin")
    return kept.view(keys.shape), segments.without_ends(segments.total(dropped)), lowest[:-1]
