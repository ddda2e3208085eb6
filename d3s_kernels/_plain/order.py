"""Values in order, within their segments; and how many of a segment are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .segments import Segments

LAST = 2**31 - 1  # a key after those of all numbers
DOUBLE_SLACK, FLOAT_SLACK = 2.0**-50, 2.0**-21  # see keep_from_ratio in csrc/core/order_key.h


def order_keys(values: Tensor) -> Tensor:
    """Whole numbers in [-2^31, 2^31) of the order of these float32 numbers; -0 and 0 share one."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


class Ranking(NamedTuple):
    order: Tensor  # int64: the positions, segment after segment, each in the order of its keys
    rank: Tensor  # int64: of each position in its segment


def ranked(keys: Tensor, segments: Segments) -> Ranking:
    """By the keys, from the lowest on; among equal ones by the position."""
    order = torch.sort((segments.of << 32) + keys, stable=True).indices
    return Ranking(order, torch.empty_like(order).scatter_(0, order, segments.place))


def highest_first(scores: Tensor, present: Tensor, segments: Segments) -> Ranking:
    """By the scores, from the highest on; those that are not present come last."""
    return ranked(torch.where(present, ~order_keys(scores), LAST), segments)


class Quota(NamedTuple):
    """How many to keep: a number, or a share of what is there. Tensors are read on the device, and if what is in them
    is not good, nothing is kept."""

    number: int | Tensor | None = None
    ratio: float | Tensor | None = None
    slack: float = DOUBLE_SLACK
    times: int = 1  # pooled: the number is for each of so many segments

    def of(self, present: Tensor) -> Tensor:
        """For each stretch, in which so many are present."""
        if self.number is not None:
            number = self.number
            each = present.clamp(max=number) if isinstance(number, int) else torch.minimum(present, number.reshape(()))
            return torch.minimum(each.clamp(min=0) * self.times, present)
        ratio, slack = self.ratio, self.slack
        assert ratio is not None
        if isinstance(ratio, Tensor):
            slack = DOUBLE_SLACK if ratio.dtype == torch.float64 else FLOAT_SLACK
            ratio = ratio.reshape(()).double()
        wanted = (present.double() * ratio * (1 - slack)).ceil().clamp(min=1)
        good = (ratio > 0) & (ratio <= 1)
        return torch.minimum(torch.where(wanted.isnan(), 0, wanted).long(), present) * good
