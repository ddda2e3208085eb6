"""The variances of the rewards of groups, and the groups that have a share of the variance of all groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments.checks import require_number, require_optional_tensors, require_readable, require_tensors
from .._segments.segments import TOLERANCE, Segments, pool, segments_of, without_spread
from .arguments import rewards_as_floats
from .rules import usable

# The relative difference at which variances, and sums of variances, still count as equal. Rewards in float32 that are
# equal in exact numbers may lead to variances that differ by some 1e-6.
_ALIKE = 1e-5


def checked_rewards(rewards: Tensor, offsets: Tensor | None) -> Tensor:
    """Checks the types of rewards and offsets. Returns the rewards in a dtype that the ops take."""
    require_readable(rewards=rewards)
    require_tensors(rewards=rewards)
    require_optional_tensors(rewards, offsets=offsets)
    return rewards_as_floats(rewards)


def finite_in_groups(rewards: Tensor, offsets: Tensor | None) -> tuple[Tensor, Segments]:
    """Returns the flat mask of the finite rewards, and the groups. Also checks the offsets."""
    # The op in usable() takes no float64, so it gets x - x, which is 0 if x is finite, else NaN.
    finite = usable((rewards - rewards).float(), None, offsets).flatten()
    return finite, segments_of(rewards, offsets)


def require_share(share: float) -> None:
    require_number(share=share)
    if not 0 < share <= 1:
        raise ValueError(f"share: got {share}; takes a number in (0, 1]")


class ByVariance(NamedTuple):
    order: Tensor  # int64 [groups]: the groups by descending variance
    number: Tensor  # int64, 0-d: how many of the first groups are needed for the share

    def marked(self, at_least: int = 0) -> Tensor:
        """Marks these groups, but at least the first ``at_least`` groups."""
        places = torch.arange(len(self.order), device=self.order.device)
        return torch.empty_like(places, dtype=torch.bool).scatter_(
            0, self.order, places < self.number.clamp(min=at_least)
        )


def variances(rewards: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Returns float64 ``[groups]``: the variance of each group's finite rewards, and 0 if they are equal except for
    rounding.
    """
    finite, groups = finite_in_groups(rewards, offsets)
    values = torch.where(finite, rewards.flatten().double(), 0.0)
    same = without_spread(values, finite, groups, TOLERANCE[rewards.dtype])

    def mean(terms: Tensor) -> Tensor:
        return groups.last(groups.scan(terms, torch.add)) / groups.total(finite)

    apart = torch.where(finite, values - mean(values)[groups.segment_ids], 0.0)
    return groups.without_ends(mean(apart.square()).masked_fill(same, 0.0))


def by_variance(variances: Tensor, share: float) -> ByVariance:
    """Orders groups by their variances, float64 ``[groups]``, and finds how many of them are needed for the share of
    the sum.
    """
    descending, order = variances.sort(descending=True, stable=True)
    falls = descending[1:] < descending[:-1] * (1 - _ALIKE)
    tie = pad(falls.cumsum(0), (1, 0))[: len(order)]  # the same number for variances that tie
    order = order[(tie * len(order) + order).argsort()]
    in_order = variances[order]
    needed = in_order > 0
    if share < 1:  # at 1, no group is left out, however small its variance is
        sums = pool(in_order).scan(in_order, torch.add)
        needed &= pad(sums, (1, 0))[:-1] < share * (1 - _ALIKE) * sums[-1:]
    return ByVariance(order, needed.sum())
