"""The ops group_advantages and max_variance_select. Both compute in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments.bundles import NOTHING, ROWS, NumberOrTensor, SegmentArguments
from .._segments.quota import Quota
from .._segments.segments import (
    TOLERANCE,
    Segments,
    both,
    lowest_first,
    pool_present,
    segments_of,
    selected_segments,
    without_spread,
)
from .kernels import like, op


@op(like("rewards", torch.float32))
def group_advantages(
    rewards: Tensor, offsets: Tensor | None = None, scale: str = "group", eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    flat, groups = rewards.flatten().double(), segments_of(rewards, offsets)
    mean, deviation, scored = _statistics(flat, groups, ddof)
    if scale == "batch":
        deviation = _statistics(flat, pool_present(~flat.isnan()), ddof)[1][0].expand_as(mean)
    difference = flat - mean[groups.segment_ids]
    scaled = difference if scale == "none" else difference / (deviation + eps)[groups.segment_ids]
    # Advantages are 0 in a group with equal rewards or a single reward, and for a reward equal to the mean, even if the
    # divisor is 0.
    same = without_spread(flat, ~flat.isnan(), groups, TOLERANCE[rewards.dtype]) | (scored == 1)
    nothing = flat.isnan() | (difference == 0) | same[groups.segment_ids]
    advantages = scaled.float().masked_fill(nothing, 0).masked_fill(groups.left_out(), math.nan)
    return advantages.view(rewards.shape)


def _statistics(rewards: Tensor, groups: Segments, ddof: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each stretch the mean, the standard deviation and the count of the rewards that are not NaN."""
    unscorable = rewards.isnan()
    scored = groups.total(~unscorable)
    mean = groups.last(groups.scan(rewards.masked_fill(unscorable, 0), torch.add)) / scored.clamp(min=1)
    squares = (rewards - mean[groups.segment_ids]).masked_fill(unscorable, 0).square()
    freedom = scored - ddof
    variance = groups.last(groups.scan(squares, torch.add)) / freedom.clamp(min=1)
    return mean, torch.where(freedom > 0, variance.sqrt(), 0), scored


@op(like("values", torch.bool))
def max_variance_select(
    values: Tensor,
    keep: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = ROWS,
) -> Tensor:
    flat, (each, times) = values.flatten().float(), selected_segments(values, segments)
    usable = both(flat.isfinite(), mask) & ~each.left_out()
    order, rank = lowest_first(flat, usable, each)
    n = each.total(usable)
    k = Quota(k=keep.number, k_tensor=keep.tensor).of(n, times=times)
    low = torch.where(k < n, _best_split(flat[order], n, k, each), k)  # if k is n, all values are kept
    low = torch.where(k == 1, 1, low)  # the variance of a single value is always 0; rounding must not decide
    rank_from_end = n[each.segment_ids] - rank  # 1 for the highest usable value, below 1 for unusable values
    high = (rank_from_end > 0) & (rank_from_end <= (k - low)[each.segment_ids])
    return ((rank < low[each.segment_ids]) | high).view(values.shape)


def _best_split(in_order: Tensor, n: Tensor, k: Tensor, segments: Segments) -> Tensor:
    """Returns for each segment with n > k values how many of the k kept values come from the low end. See
    csrc/core/split_scan.h.

    The values are sorted in ascending order, and counted from 0. Split i keeps the first i and the last k - i values,
    so split i + 1 keeps value i instead of value n - k + i. Split 0 has the moments of the last k values. A running sum
    over these exchanges then gives the moments of all splits.
    """
    ids, place = segments.segment_ids, segments.place
    usable, exchanged, kept = place < n[ids], place < k[ids], k[ids]
    shift = pad(in_order, (0, 1))[segments.edges[:-1] + n // 2].double()
    value = torch.where(usable, in_order.double() - shift[ids], 0)
    partner = torch.arange(len(value), device=value.device) + (n - k)[ids]
    out = value[torch.where(exchanged, partner, 0)]
    exchanges = torch.stack([value - out, value.square() - out.square()])
    highest = torch.stack([value, value.square()])
    running = segments.scan(torch.cat([exchanges * exchanged, highest * (usable & (place >= (n - k)[ids]))]), torch.add)
    before = torch.where(place > 0, pad(running[:2, :-1], (1, 0)), 0)
    total, square = before + segments.last(running[2:])[:, ids]
    spread = torch.where(place <= k[ids], kept * square - total.square(), -math.inf)
    # Splits within 1e-12 of the largest spread count as equal. Of these, the split that keeps the fewest of the highest
    # values is chosen.
    equal = segments.last(segments.scan(spread, torch.maximum)) * (1 - 1e-12)
    return segments.last(segments.scan(torch.where(spread >= equal[ids], place, 0), torch.maximum))
