"""Chooses the same number of rollouts on every rank, with nearly the largest variance that such a choice can have.

Each of R ranks keeps q values. The variance is convex in each value, so a rank keeps its i lowest and its q - i
highest, for some i. Start with the q highest of all ranks. Exchange number i of rank r then replaces h, the lowest that
is left of its highest values, by l, its i-th lowest. Along a rank the midpoints (l + h) / 2 do not decrease. For a
fixed centre c an exchange adds (l - c)^2 - (h - c)^2 to the sum of (x - c)^2, which is positive if c lies above the
midpoint. So the set with the largest sum makes exactly the exchanges whose midpoint lies below c. One chain, made of
all ranks' exchanges in the order of their midpoints, therefore has the best set for every centre. It has only q R + 1
sets, and all are tried.

Let F be the sum of squared deviations of a set. F is the set's smallest sum of (x - c)^2 over all centres c, so max F
is at most the minimum over c of the largest sum. Let c* be the centre of that minimum. The means of the chain's sets
cross c* between the set before c* and the set behind it, and each exchange moves the mean by d / k, where d = h - l and
k = q R. One of the two sets next to the crossing has its mean within d / (2 k) of c*, and its F is k (mean - c*)^2
below the bound. So the chain's best set is within d^2 / (4 k) of the optimum, with d of the exchange at the crossing:
this is less than one rollout's part of the sum. To find the optimum itself is as hard as to divide numbers into two
equal sums: with the values -d_r and d_r on rank r and q = 1, one has to maximise sum d_r^2 - (sum +-d_r)^2 / R.

With one rank the chain is the scan over all splits (csrc/core/split_scan.h), and gives the same set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._segments.segments import pool


def most_varied(values: Tensor, wanted: Tensor) -> Tensor:
    """Marks the same number of values in each row of ``[ranks, most]``: ``wanted`` divided by the ranks and rounded up,
    or as many as the row with the fewest usable values has. Usable values are finite. Nothing waits for the device.
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
    """``[ranks, 1]``: how many exchanges each rank makes in the best set of the chain."""
    ranks, most = in_order.shape
    exchanged, usable = place < each, place < have
    partner = (place + have - each).clamp(max=most - 1)
    midpoint = in_order + in_order.gather(1, partner)  # twice the midpoint, which has the same order
    # Exchanges tie if rewards are 0 and 1. The ranks then make them in turn, so that each keeps values of both ends.
    turns = midpoint.masked_fill(~exchanged, math.inf).T.reshape(-1).argsort(stable=True)
    chain = turns % ranks * most + turns // ranks

    # Values are shifted by one of them, since large ones with small differences would cancel. Sums are made by
    # doubling, since their bits have to be the same on all ranks and from run to run.
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
    spread = torch.where(number <= kept, kept * square - total.square(), -math.inf)
    chosen = number.where(spread >= spread.max() * (1 - 1e-12), 0).max()
    chosen = torch.where(kept == 1, 1, chosen)  # a single value has variance 0; rounding must not choose
    made = torch.zeros_like(chain, dtype=torch.bool).scatter(0, chain, number[:-1] < chosen)
    return made.view(ranks, most).sum(1, keepdim=True)
