"""Marks the same number of values in each row of a table, where a row is one rank, with nearly the largest variance."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._segments.segments import pool

# Every rank keeps the same number of values. Among all such choices, the choice made here has nearly the largest
# variance.
#
# Each of R ranks keeps q values. The variance is convex in each value, so in the best choice each rank keeps its i
# lowest and its q - i highest values, for some i that may differ between ranks. Start with the q highest values of each
# rank. The i-th exchange of a rank replaces h by l: l is the rank's i-th lowest value, and h is the i-th lowest of its
# q highest values. From one exchange of a rank to the next, the midpoint (l + h) / 2 does not decrease.
#
# For a fixed centre c, an exchange adds (l - c)^2 - (h - c)^2 to the sum of (x - c)^2 over the kept values x. This
# difference is positive if c lies above the midpoint. So exactly the exchanges whose midpoint lies below c lead to the
# set with the largest sum. Put the exchanges of all ranks in the order of their midpoints. The sets after 0, 1, ...
# of these q R exchanges form a chain, which contains the set with the largest sum for every centre. There are only
# q R + 1 sets in the chain, and all of them are tried.
#
# How good is the best set of the chain? For a set of k = q R values, let S(c) be its sum of (x - c)^2, and let F be
# S(mean), the minimum of S. Let M(c) be the largest S(c) of any set. Then no set has an F above M(c), whatever c is.
# Let c* be the centre at which M is smallest, and let B be M(c*). A set of the chain may have the mean c* and an S(c*)
# of B. Then the F of this set is B, which is the optimum. Otherwise there is an exchange with the midpoint c*: both the
# set before it and the set after it have an S(c*) of B, and their means lie on different sides of c*. The exchange
# moves the mean by d / k, where d = h - l. So one of the two means m is within d / (2 k) of c*, and the F of this set,
# B - k (m - c*)^2, is within d^2 / (4 k) of the optimum. This is less than one rollout's part of the sum.
#
# Finding the optimum itself is as hard as dividing numbers into two sets with equal sums. For example, let each rank r
# have the values -d_r and d_r, and let q be 1. Then the signs must be chosen that maximise
# sum d_r^2 - (sum +-d_r)^2 / R.
#
# With one rank, the chain consists of the splits in csrc/core/split_scan.h, and the same set is chosen as there.


def most_varied(values: Tensor, wanted: Tensor) -> Tensor:
    """Marks the same number of values in each row of ``[ranks, most]``: ``wanted / ranks``, rounded up. If a row has
    fewer finite values, all rows get only as many marks as this row has finite values. No host sync.
    """
    ranks, most = values.shape
    usable = values.isfinite()
    if most == 0:
        return usable
    have = usable.sum(1, keepdim=True)
    each = torch.minimum((wanted.long() + ranks - 1) // ranks, have.min()).clamp(min=0)
    in_order, order = values.masked_fill(~usable, math.inf).sort(dim=1, stable=True)
    place = torch.arange(most, device=values.device).expand(ranks, most)

    made = _exchanges(in_order.double(), have, each, place)
    low = place < made
    high = (place >= have - each + made) & (place < have)
    return torch.zeros_like(usable).scatter(1, order, low | high)


def _exchanges(in_order: Tensor, have: Tensor, each: Tensor, place: Tensor) -> Tensor:
    """Returns ``[ranks, 1]``: how many exchanges each rank makes to reach the best set of the chain."""
    ranks, most = in_order.shape
    exchanged, usable = place < each, place < have
    partner = (place + have - each).clamp(max=most - 1)
    midpoint = in_order + in_order.gather(1, partner)  # twice the midpoint, which has the same order
    # If all rewards are 0 or 1, many exchanges have equal midpoints. The ranks then make their exchanges in turn, so
    # that each rank keeps values from both ends.
    turns = midpoint.masked_fill(~exchanged, math.inf).T.reshape(-1).argsort(stable=True)
    chain = turns % ranks * most + turns // ranks

    # One of the values is subtracted from all values, since sums of large values with small differences would lose
    # precision. Sums are computed by doubling, since they must be bitwise equal on all ranks and in all runs.
    shift = in_order[0, (have[0] // 2).clamp(max=most - 1)]
    value = (in_order - shift).masked_fill(~usable, 0)
    out = value.gather(1, partner)
    exchanges = torch.stack([value - out, value.square() - out.square()]) * exchanged
    highest = torch.stack([value, value.square()]) * (usable & (place >= have - each))
    terms = torch.cat([exchanges.view(2, -1)[:, chain], highest.view(2, -1)])
    running = pool(in_order).scan(terms, torch.add)
    total, square = running[2:, -1:] + pad(running[:2], (1, 0))

    # Spreads this close to the largest spread count as equal. Among equal sets, the set that keeps the fewest of the
    # highest values is chosen.
    kept, number = each * ranks, torch.arange(ranks * most + 1, device=chain.device)
    spread = torch.where(number <= kept, kept * square - total.square(), -math.inf)
    chosen = number.where(spread >= spread.max() * (1 - 1e-12), 0).max()
    chosen = torch.where(kept == 1, 1, chosen)  # the variance of a single value is always 0; rounding must not decide
    made = torch.zeros_like(chain, dtype=torch.bool).scatter(0, chain, number[:-1] < chosen)
    return made.view(ranks, most).sum(1, keepdim=True)
