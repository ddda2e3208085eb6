"""group_advantages: rewards minus the mean of their group, scaled, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._segments.segments import TOLERANCE, Segments, pool_present, segments_of, without_spread
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
    """For each stretch: mean, standard deviation and number of the rewards that are not NaN."""
    unscorable = rewards.isnan()
    scored = groups.total(~unscorable)
    mean = groups.last(groups.scan(rewards.masked_fill(unscorable, 0), torch.add)) / scored.clamp(min=1)
    squares = (rewards - mean[groups.segment_ids]).masked_fill(unscorable, 0).square()
    freedom = scored - ddof
    variance = groups.last(groups.scan(squares, torch.add)) / freedom.clamp(min=1)
    return mean, torch.where(freedom > 0, variance.sqrt(), 0), scored
