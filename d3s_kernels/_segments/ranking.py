"""Orders values within their segments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .order_key import NO_KEY, order_key
from .segments import Segments


class Ranking(NamedTuple):
    order: Tensor  # int64: the positions, segment after segment, each in the order of its keys
    rank: Tensor  # int64: the rank of each position within its segment


def lowest_first(values: Tensor, present: Tensor, segments: Segments) -> Ranking:
    """Ranks the float32 values from the lowest on, equal ones by position. Values that are not present come last."""
    return _by_key(order_key(values).where(present, NO_KEY), segments)


def highest_first(scores: Tensor, present: Tensor, segments: Segments) -> Ranking:
    """Ranks from the highest score on; among equal ones the lower position still comes first."""
    return _by_key((NO_KEY - order_key(scores)).where(present, NO_KEY), segments)


def _by_key(keys: Tensor, segments: Segments) -> Ranking:
    order = torch.sort((segments.of << 32) + keys, stable=True).indices
    return Ranking(order, torch.empty_like(order).scatter_(0, order, segments.place))
