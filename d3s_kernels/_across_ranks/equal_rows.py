"""The rollouts with nearly the largest variance among those choices that keep the same number on every rank.

Of R ranks each keeps q. The variance is convex in each value, so a rank keeps its i lowest and its q - i highest, for
some i. Start with all ranks' q highest; then rank r's exchange number i puts its i-th lowest, l, in the place of the
lowest that is left of its highest, h. Along a rank the midpoints (l + h) / 2 do not decrease. Against a fixed centre c
an exchange adds (l - c)^2 - (h - c)^2, which is positive where c lies above its midpoint: the set with the largest sum
of (x - c)^2 makes exactly the exchanges with a midpoint below c. So one chain, all ranks' exchanges in the order of
their midpoints, has the best set for every centre, and it has only q R + 1 sets: all are tried.

A set's sum of squared deviations, F, is its smallest sum over all centres, hence max F <= min over c of the largest sum
of (x - c)^2. Where that minimum lies, c*, the mean of the chain's sets crosses c*: going from the set before c* to that
behind it, each exchange moves the mean by d / k, with d = h - l and k = q R. Of the two sets on both sides of the
crossing one has its mean within d / (2 k) of c*, and its F is k (mean - c*)^2 below the bound. So the chain's best is
within d^2 / (4 k) of the optimum, d being the exchange at the crossing: less than one rollout's part of the sum. To
find the optimum itself is as hard as to divide numbers into two equal sums: with the values -d_r and d_r on rank r and
q = 1, sum d_r^2 - (sum +-d_r)^2 / R is what there is to gain.

With one rank the chain is the scan over all splits (csrc/core/split_scan.h), and gives the same set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._segments.segments import pool


def most_varied(values: Tensor, wanted: Tensor) -> Tensor:
    """Marks the same number of each row of ``[ranks, most]``, ``wanted`` in all (rounded up to that), or as many as the
    row with the fewest usable values has. What is not finite is not usable. Nothing waits for the device.
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
    """``[ranks, 1]``: how many exchanges the best set of the chain makes on each rank."""
    ranks, most = in_order.shape
    exchanged, usable = place < each, place < have
    partner = (place + have - each).clamp(max=most - 1)
    midpoint = in_order + in_order.gather(1, partner)  # twice, which orders them alike
    # Exchanges that tie, as all do where rewards are 0 and 1, are made on all ranks in turn: each keeps of both ends.
    turns = midpoint.masked_fill(~exchanged, math.inf).T.reshape(-1).argsort(stable=True)
    chain = turns % ranks * most + turns // ranks

    # Values are shifted by one of them: else large ones with small differences cancel. Sums go by doubling, as their
    # bits have to be the same on all ranks and from run to run.
    shift = in_order[0, (have[0] // 2).clamp(max=most - 1)]
    value = (in_order - shift).masked_fill(~usable, 0)
    out = value.gather(1, partner)
    exchanges = torch.stack([value - out, value.square() - out.square()]) * exchanged
    highest = torch.stack([value, value.square()]) * (usable & (place >= have - each))
    terms = torch.cat([exchanges.view(2, -1)[:, chain], highest.view(2, -1)])
    running = pool(in_order).scan(terms, torch.add)
    total, square = running[2:, -1:] + pad(running[:2], (1, 0))

    # Sets this close to the best count as equal; among them the one with the fewest from the top wins.
    kept, number = each * ranks, torch.arange(ranks * most + 1, device=chain.device)
    spread = torch.where(number <= kept, square - total.square() / kept.clamp(min=1), -math.inf)
    chosen = number.where(spread >= spread.max() * (1 - 1e-12), 0).max()
    chosen = torch.where(kept == 1, 1, chosen)  # one value has no variance, whichever it is
    made = torch.zeros_like(chain, dtype=torch.bool).scatter(0, chain, number[:-1] < chosen)
    return made.view(ranks, most).sum(1, keepdim=True)
