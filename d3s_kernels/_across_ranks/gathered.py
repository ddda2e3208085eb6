"""Gathers all ranks' rollouts into one tensor. This is little data: one number for each rollout.

Ranks may hold different numbers of rollouts, or none. Every rank sends a message of the same length: ``max_rollouts``
values, which is the caller's bound, or without it the largest number of all ranks, which takes a round before and a
wait of the host. With the bound, only the device knows where one rank's values end and the next one's begin, and the
host does not wait for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._groups import Ranks

_HEADER = 2  # before the values, in int32: how many there are, and another number


class Everyones(NamedTuple):
    """What each rank holds: a row for each rank."""

    values: Tensor  # [ranks, most]: NaN after a rank's last
    sizes: Tensor  # int64 [ranks]: how many values it has
    numbers: Tensor  # int64 [ranks]: the number that it sends with them
    total: int | None  # how many values all ranks have; None if the host does not know

    @property
    def length(self) -> int:
        """The length of the concatenation: the total, or a bound on it."""
        return self.values.numel() if self.total is None else self.total


class Concatenation(NamedTuple):
    """The values of all ranks in rank order, and padding of NaN up to the end."""

    values: Tensor  # [length]
    total: Tensor  # int64 [1]: how many values all ranks have
    begin: Tensor  # int64 [1]: where the values of this rank begin
    own: Tensor  # int64 [values of this rank]: where they are

    def with_tail(self, offsets: Tensor) -> Tensor:
        """The offsets of the ranks' values, with the padding as one more segment."""
        return torch.cat([offsets, offsets.new_full((1,), len(self.values))])

    def as_one_segment(self) -> Tensor:
        return self.with_tail(torch.cat([self.total.new_zeros(1), self.total]))


def gather(ranks: Ranks, values: Tensor, number: int, max_rollouts: int | None) -> Everyones:
    """Gathers the values of all ranks, float32 or float64 ``[n]``, and a number of each rank, in one round with
    ``max_rollouts`` and in two without.
    """
    most, total = max_rollouts, None
    if most is None:
        lengths = ranks.gather_number(len(values), values).tolist()  # waits for the device
        most, total = max(lengths), sum(lengths)
    # As int32, so that nothing treats the two integers of the header as floats.
    padded = pad(values, (0, most - len(values)), value=math.nan).view(torch.int32)
    message = padded.new_empty(_HEADER + len(padded))
    message[0], message[1], message[_HEADER:] = len(values), number, padded
    all_messages = ranks.gather(message)
    sizes = all_messages[:, 0].long()
    if total is None and _is_at_hand(sizes):
        total = int(sizes.sum())
    return Everyones(all_messages[:, _HEADER:].contiguous().view(values.dtype), sizes, all_messages[:, 1].long(), total)


def _is_at_hand(sizes: Tensor) -> bool:
    """Whether the host can read the sizes without waiting."""
    return sizes.is_cpu and not torch.compiler.is_compiling()


def concatenate(everyones: Everyones, rank: int, held: int) -> Concatenation:
    """The concatenation for ``rank``, which holds ``held`` values."""
    most = everyones.values.shape[1]
    ends = everyones.sizes.cumsum(0)
    begins = ends - everyones.sizes
    begin = begins[rank : rank + 1]
    own = begin + torch.arange(held, device=ends.device)
    if everyones.total == everyones.values.numel():  # no row has padding: the values are contiguous already
        return Concatenation(everyones.values.view(-1), ends[-1:], begin, own)
    place = torch.arange(everyones.length, device=ends.device)
    holder = torch.searchsorted(ends, place, right=True)  # one past the last rank for the padding
    inside = place < ends[-1]
    holder = holder.where(inside, 0)
    source = (holder * most + place - begins[holder]).where(inside, 0)
    values = everyones.values.view(-1)[source].masked_fill(~inside, math.nan)
    return Concatenation(values, ends[-1:], begin, own)
