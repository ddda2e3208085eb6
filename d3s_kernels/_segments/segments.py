"""Segments of a flat tensor: the segment of each value, sums over segments, and the order of the values in a segment.

The lengths of segments stay on the device, so that there is no host sync. Floats are summed by doubling, so that the
order of the additions depends only on the positions of the terms in their segment. In torch's own sums, the order also
depends on the shape of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments.bundles import SegmentArguments


class Segments(NamedTuple):
    """A flat tensor cut into stretches that follow each other without a gap.

    Each segment is a stretch. If segments come from offsets, there is one additional stretch at each end, for the
    values that unchecked offsets may leave out. With valid offsets, these two stretches are empty.
    """

    edges: Tensor  # int64 [stretches + 1]: the index at which each stretch begins, then the number of values
    segment_ids: Tensor  # int64 [values]: the stretch of each value
    place: Tensor  # int64 [values]: the index of each value within its stretch
    longest: int  # an upper bound on the length of a stretch
    ragged: bool  # whether there are the two additional stretches

    @property
    def number(self) -> int:
        return self.edges.shape[0] - 1 - 2 * self.ragged

    def without_ends(self, numbers: Tensor) -> Tensor:
        """Drops the elements of the two additional stretches, so that one element for each segment is left."""
        return numbers[1:-1] if self.ragged else numbers

    def spread(self, numbers: Tensor) -> Tensor:
        """Returns for each value the element of ``numbers`` for the value's segment. For values that the offsets leave
        out, returns NaN, or 0 if the elements are integers.
        """
        nothing = math.nan if numbers.is_floating_point() else 0
        return (pad(numbers, (1, 1), value=nothing) if self.ragged else numbers)[self.segment_ids]

    def left_out(self) -> Tensor:
        if not self.ragged:
            return torch.zeros_like(self.segment_ids, dtype=torch.bool)
        return (self.segment_ids == 0) | (self.segment_ids == self.number + 1)

    def total(self, whole: Tensor) -> Tensor:
        """Returns for each stretch the sum of integers or flags."""
        return pad(whole.cumsum(0), (1, 0))[self.edges].diff()

    def count_before(self, flags: Tensor) -> Tensor:
        """Returns for each value how many values before it in its stretch are flagged."""
        counted = pad(flags.cumsum(0), (1, 0))
        return counted[:-1] - counted[self.edges[:-1]][self.segment_ids]

    def scan(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Computes an inclusive scan over each stretch: combines each of the values ``[..., n]`` with all earlier
        values of its stretch.
        """
        distance = 1
        while distance < self.longest:
            here, before = values[..., distance:], values[..., :-distance]
            combined = torch.where(self.place[distance:] >= distance, combine(here, before), here)
            values = torch.cat([values[..., :distance], combined], -1)
            distance *= 2
        return values

    def last(self, scanned: Tensor) -> Tensor:
        """Returns the scanned value at the end of each stretch, or 0 for an empty stretch."""
        at_ends = pad(scanned, (1, 0))[..., self.edges[1:]]
        return torch.where(self.edges.diff() > 0, at_ends, 0)


def segments_of(values: Tensor, offsets: Tensor | None) -> Segments:
    """Returns the segments of a tensor: the rows along its last dimension or, with offsets, the segments into which the
    offsets cut a 1-D tensor.
    """
    n = values.numel()
    if offsets is None:
        count, length = math.prod(values.shape[:-1]), values.shape[-1]
        return _segments(torch.arange(count + 1, device=values.device) * length, n, length, ragged=False)
    inside = offsets.long().clamp(0, n).cummax(0).values
    return _segments(torch.cat([inside.new_zeros(1), inside, inside.new_full((1,), n)]), n, n, ragged=True)


def pool(values: Tensor) -> Segments:
    """Returns one segment that contains all values."""
    n = values.numel()
    return _segments(torch.arange(2, device=values.device) * n, n, n, ragged=False)


def selected_segments(values: Tensor, segments: SegmentArguments) -> tuple[Segments, int]:
    """Returns the segments from which an op selects, and the number of segments that are pooled into each of them."""
    if segments.pooled:
        return pool(values), segments.number_in(values)
    return segments_of(values, segments.offsets), 1


def pool_present(present: Tensor) -> Segments:
    """Returns two stretches: all values up to the last present value, and the values after it. So sums over the first
    stretch do not depend on how many values follow.
    """
    n = present.numel()
    place = torch.arange(n + 1, device=present.device)
    end = place.where(pad(present.flatten(), (1, 0)), 0).max()
    return _segments(torch.stack([place[0], end, place[n]]), n, n, ragged=False)


def _segments(edges: Tensor, values: int, longest: int, ragged: bool) -> Segments:
    positions = torch.arange(values, device=edges.device)
    segment_ids = torch.searchsorted(edges[1:], positions, right=True)
    return Segments(edges, segment_ids, positions - edges[segment_ids], longest, ragged)


def flags(mask: Tensor) -> Tensor:
    """Returns the flat mask with only the bytes 0 and 1. A bool tensor that is a view of other data may contain any
    byte.
    """
    return mask.flatten().view(torch.uint8) != 0


def both(present: Tensor, mask: Tensor | None) -> Tensor:
    return present if mask is None else present & flags(mask)


# ---- the order of the values, by keys: integers that sort in the same order as the floats (csrc/core/order_key.h) ----

ABSENT = 0  # the key of a value that is NaN or excluded by the mask
ZERO_KEY = 2**31  # the key of 0; positive numbers have larger keys
NO_KEY = 2**32 - 1  # larger than the key of any float


def order_key(values: Tensor) -> Tensor:
    """Returns the int64 key of each float32. Keys are in [1, 2^32) and sort like the floats; -0 and 0 have the same
    key.
    """
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + ZERO_KEY


def order_key_value(keys: Tensor) -> Tensor:
    """Converts each key back to its float32."""
    return torch.where(keys >= ZERO_KEY, keys - ZERO_KEY, -1 - keys).int().view(torch.float32)


def signed(keys: Tensor) -> Tensor:
    """Returns the keys as int32 with the same 32 bits, since torch has few operations for uint32."""
    return torch.where(keys >= ZERO_KEY, keys - 2**32, keys).int()


def unsigned(keys: Tensor) -> Tensor:
    """Reads int32 keys as unsigned 32-bit integers, and returns these as int64."""
    return keys.long() & NO_KEY


class Ranking(NamedTuple):
    order: Tensor  # int64: the positions, segment after segment, and in the order of the keys within a segment
    rank: Tensor  # int64: the rank of each position within its segment


def lowest_first(values: Tensor, present: Tensor, segments: Segments) -> Ranking:
    """Ranks the float32 values of each segment from the lowest to the highest, and equal values by position. Values
    that are not present come last.
    """
    return _by_key(order_key(values).where(present, NO_KEY), segments)


def highest_first(scores: Tensor, present: Tensor, segments: Segments) -> Ranking:
    """Like :func:`lowest_first`, but ranks the scores from the highest to the lowest."""
    return _by_key((NO_KEY - order_key(scores)).where(present, NO_KEY), segments)


def _by_key(keys: Tensor, segments: Segments) -> Ranking:
    order = torch.sort((segments.segment_ids << 32) + keys, stable=True).indices
    return Ranking(order, torch.empty_like(order).scatter_(0, order, segments.place))


def advantage_of_each(advantages: Tensor, entropy: Tensor, sequences: Segments) -> Tensor:
    """Spreads advantages over the tokens: 0-d, one for each token, or one for each sequence. A shape that fits both
    tokens and sequences means one for each token.
    """
    if advantages.dim() == 0:
        return advantages
    if advantages.shape == entropy.shape:
        return advantages.flatten()
    return sequences.spread(advantages.flatten())


# ---- rewards that are equal except for rounding ----------------------------------------------------------------------

# For each dtype, the largest difference at which rewards still count as equal, relative to max(largest |reward|, 1).
# For float64 and float32, it is about eight rounding steps of the dtype; for bfloat16 and float16, it is one rounding
# step. csrc/ops/rollouts.h has the same values.
TOLERANCE = {torch.float64: 2e-15, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def without_spread(rewards: Tensor, scored: Tensor, segments: Segments, tolerance: float) -> Tensor:
    """Returns for each stretch whether its scored rewards (float64) are equal except for rounding. The result is false
    for a stretch with an infinite reward, and true for a stretch without scored rewards.
    """

    def largest(values: Tensor) -> Tensor:
        start = values.new_full((segments.edges.shape[0] - 1,), -math.inf)
        return start.scatter_reduce(0, segments.segment_ids, values.masked_fill(~scored, -math.inf), "amax")

    highest, lowest = largest(rewards), -largest(-rewards)
    size = torch.maximum(highest, -lowest)  # the largest |reward|
    return ~((highest - lowest > tolerance * size.clamp(min=1)) | (size == math.inf))
