"""Arithmetic with the same bits on every device: an exponential, and means that do not depend on the order of terms.

The steps are those of csrc/core/exponential.h and csrc/core/exact_sum.h, and each is rounded separately.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_UNIT = 2.0**-26  # terms are rounded to multiples of it
_FAR = 4096.0  # terms of at least this size count as infinite
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which is in the low bits of the sum
_MAGIC_BITS = 0x4B400000


def exponential(x: Tensor) -> Tensor:
    inside = x.clamp(-104.0, 89.0)  # beyond, the result is 0 or infinite; NaN stays
    total = inside * 1.44269504 + _MAGIC
    n = total - _MAGIC
    r = (inside - n * 0.693145752) - n * 1.42860677e-6
    q = torch.full_like(r, 1.374611515e-3)
    for coefficient in (8.371827193e-3, 4.166996479e-2, 1.666648984e-1, 4.999998510e-1):
        q = q * r + coefficient
    e = (r * r * q + r) + 1.0
    power = total.view(torch.int32) - _MAGIC_BITS
    half = power >> 1  # in two steps, since a float may not hold the power
    return e * _power_of_two(half) * _power_of_two(power - half)


def _power_of_two(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)


def exact_means(terms: Tensor, present: Tensor, slot: Tensor, slots: int) -> Tensor:
    """The mean of the present terms of each slot. It is 0 for a slot without terms, infinite if a term is infinite, and
    NaN if a term is NaN or both infinities occur."""
    far = present & ~(terms.abs() < _FAR)
    units = torch.where(present & ~far, terms, 0).mul_(1 / _UNIT).round().long()
    above, below = far & ~(terms < 0), far & ~(terms > 0)  # NaN is both
    rows = torch.stack([units, present.long(), above.long(), below.long()], 1)
    total, count, above, below = rows.new_zeros(slots, 4).index_add_(0, slot, rows).unbind(1)
    mean = total.float() * _UNIT / count.clamp(min=1).float()
    infinite = mean.masked_fill(above > 0, math.inf).masked_fill(below > 0, -math.inf)
    return infinite.masked_fill((above > 0) & (below > 0), math.nan)
