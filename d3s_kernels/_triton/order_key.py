"""Order keys: integers that sort in the same order as the floats, as in ``csrc/core/order_key.h``."""

from __future__ import annotations

import triton
import triton.language as tl

ABSENT = tl.constexpr(0)  # for a value that is masked out or NaN
ZERO_KEY = tl.constexpr(0x80000000)
NO_KEY = tl.constexpr(0xFFFFFFFF)  # above the key of any float


@triton.jit
def order_key(value):
    """Returns the uint32 key of a float. A larger float has a larger key, -0 and 0 have the same key, and the key of
    NaN is ABSENT.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    return tl.where(value == value, key, ABSENT)


@triton.jit
def order_key_value(key):
    """Converts a key back to its float."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -0x80000000, ~bits).to(tl.float32, bitcast=True)
