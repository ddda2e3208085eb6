"""Segments of a flat tensor, and sums over them.

Lengths stay on the device, so that the host never waits for it. Floats are summed by doubling, in an order that depends
only on a value's place in its segment; torch's own sums would change with the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Segments(NamedTuple):
    """A flat tensor cut into stretches that follow each other without a gap.

    The stretches are the segments. Offsets add one more stretch at each end, for values that unchecked offsets leave
    out. With valid offsets these two are empty.
    """

    edges: Tensor  # int64 [stretches + 1]: where each stretch begins, and where the last one ends
    of: Tensor  # int64 [values]: the stretch of each value
    place: Tensor  # int64 [values]: the place of each value in its stretch
    longest: int  # a bound: no stretch is longer
    ragged: bool  # whether there are the two additional stretches

    @property
    def number(self) -> int:
        return self.edges.shape[0] - 1 - 2 * self.ragged

    def own(self, numbers: Tensor) -> Tensor:
        """From one number for each stretch, the numbers of the segments."""
        return numbers[1:-1] if self.ragged else numbers

    def spread(self, numbers: Tensor) -> Tensor:
        """For each value the number of its segment; for values that are left out NaN, or 0 if numbers are integers."""
        nothing = math.nan if numbers.is_floating_point() else 0
        return (pad(numbers, (1, 1), value=nothing) if self.ragged else numbers)[self.of]

    def left_out(self) -> Tensor:
        if not self.ragged:
            return torch.zeros_like(self.of, dtype=torch.bool)
        return (self.of == 0) | (self.of == self.number + 1)

    def total(self, whole: Tensor) -> Tensor:
        """The sum of whole numbers or flags over each stretch."""
        return pad(whole.cumsum(0), (1, 0))[self.edges].diff()

    def scan(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Each of the values ``[..., n]`` combined with all those before it in its stretch."""
        distance = 1
        while distance < self.longest:
            here, before = values[..., distance:], values[..., :-distance]
            combined = torch.where(self.place[distance:] >= distance, combine(here, before), here)
            values = torch.cat([values[..., :distance], combined], -1)
            distance *= 2
        return values

    def last(self, scanned: Tensor) -> Tensor:
        """The last scanned value of each stretch; 0 for an empty stretch."""
        found = pad(scanned, (1, 0))[..., self.edges[1:]]
        return torch.where(self.edges.diff() > 0, found, 0)


def segments_of(values: Tensor, offsets: Tensor | None) -> Segments:
    """The rows of the last dimension, or the segments of a 1-D tensor that the offsets give."""
    n = values.numel()
    if offsets is None:
        count, length = math.prod(values.shape[:-1]), values.shape[-1]
        return _segments(torch.arange(count + 1, device=values.device) * length, n, length, ragged=False)
    inside = offsets.long().clamp(0, n).cummax(0).values
    return _segments(torch.cat([inside.new_zeros(1), inside, inside.new_full((1,), n)]), n, n, ragged=True)


def pool(values: Tensor) -> Segments:
    """All values as one segment."""
    n = values.numel()
    return _segments(torch.arange(2, device=values.device) * n, n, n, ragged=False)


def pool_present(present: Tensor) -> Segments:
    """Two stretches: all values up to the last one present, whose sums so depend on nothing behind it, and the rest."""
    n = present.numel()
    place = torch.arange(n + 1, device=present.device)
    end = place.where(pad(present.flatten(), (1, 0)), 0).max()
    return _segments(torch.stack([place[0], end, place[n]]), n, n, ragged=False)


def _segments(edges: Tensor, values: int, longest: int, ragged: bool) -> Segments:
    positions = torch.arange(values, device=edges.device)
    of = torch.searchsorted(edges[1:], positions, right=True)
    return Segments(edges, of, positions - edges[of], longest, ragged)


def flags(mask: Tensor) -> Tensor:
    """The flat mask with bytes 0 and 1 only: a bool tensor that views other data may hold any byte."""
    return mask.flatten().view(torch.uint8) != 0


def both(present: Tensor, mask: Tensor | None) -> Tensor:
    return present if mask is None else present & flags(mask)
