"""Which groups have rewards that are equal up to rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .segments import Segments

_ROUNDING = {torch.float64: 2e-15, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def tolerance_of(dtype: torch.dtype) -> float:
    """How far apart equal rewards of this dtype may be after rounding, relative to the largest ``|reward|`` or to 1:
    some eight steps, or one of half precision. ``csrc/ops/rollouts.h`` says the same.
    """
    return _ROUNDING[dtype]


def without_spread(rewards: Tensor, scored: Tensor, segments: Segments, tolerance: float) -> Tensor:
    """For each stretch, whether its scored rewards, float64, are equal up to rounding. Infinite ones never are; without
    any, it is true.
    """

    def most(of: Tensor) -> Tensor:
        start = of.new_full((segments.edges.shape[0] - 1,), -math.inf)
        return start.scatter_reduce(0, segments.of, of.masked_fill(~scored, -math.inf), "amax")

    highest, lowest = most(rewards), -most(-rewards)
    size = torch.maximum(highest, -lowest)  # the largest |reward|
    return ~((highest - lowest > tolerance * size.clamp(min=1)) | (size == math.inf))
