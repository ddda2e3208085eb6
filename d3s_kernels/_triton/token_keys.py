"""Triton functions for scores of tokens, order keys of scores, and the number of tokens to keep in a segment."""

from __future__ import annotations

import triton
import triton.language as tl

from .order_key import order_key, order_key_value

# 1 - kDoubleSlack and 1 - kFloatSlack of csrc/core/quota.h
DOUBLE_SLACK = tl.constexpr(1 - 2.0**-50)
FLOAT_SLACK = tl.constexpr(1 - 2.0**-21)


@triton.jit
def share(ratio, slack, present):
    """Returns ceil(ratio * present), at least 1 and at most ``present``; 0 for an unchecked ratio that is not valid."""
    wanted = tl.ceil(ratio.to(tl.float64) * present.to(tl.float64) * slack)
    k = tl.where(wanted < present.to(tl.float64), wanted, present.to(tl.float64)).to(tl.int64)
    return tl.where((ratio > 0) & (ratio <= 1), tl.maximum(k, tl.minimum(present, 1)), 0)


@triton.jit
def number(k, present, times):
    """Returns how many values are kept: ``k`` for each of ``times`` pooled segments, up to ``present``; 0 if k < 1."""
    return tl.where(k < 1, 0, tl.minimum(tl.minimum(k, present) * times, present))


@triton.jit
def quota_of(present, ratio_bits, ratio, k, k_tensor, times):
    """Returns how many of a segment's ``present`` values are kept."""
    present = present.to(tl.int64)
    if k_tensor is not None:
        return number(tl.load(k_tensor).to(tl.int64), present, times)
    elif k is not None:
        return number(k + 0 * present, present, times)
    elif ratio is None:
        return share((ratio_bits + 0 * present).to(tl.float64, bitcast=True), DOUBLE_SLACK, present)
    elif ratio.dtype.element_ty == tl.float64:
        return share(tl.load(ratio), DOUBLE_SLACK, present)
    else:
        return share(tl.load(ratio), FLOAT_SLACK, present)


@triton.jit
def values_of(scores, advantages, mask, segment, length, index, PER_TOKEN: tl.constexpr):
    """Returns a segment's scores, or |A| * H, at ``index``; NaN for absent tokens. If ``scores`` are int32, they are
    order keys already.
    """
    inside = index < length
    if scores.dtype.element_ty == tl.int32:
        value = order_key_value(tl.load(scores + segment * length + index, mask=inside, other=0))
    else:
        value = tl.load(scores + segment * length + index, mask=inside, other=float("nan")).to(tl.float32)
        if advantages is not None:
            if PER_TOKEN:
                advantage = tl.load(advantages + segment * length + index, mask=inside, other=0.0)
            else:
                advantage = tl.load(advantages + segment)
            value = tl.abs(advantage) * value
    if mask is not None:
        present = tl.load(mask + segment * length + index, mask=inside, other=0) != 0
        value = tl.where(present, value, float("nan"))
    return value


@triton.jit
def keys_of(scores, advantages, mask, segment, length, index, PER_TOKEN: tl.constexpr):
    """Returns the order keys of the results of :func:`values_of`."""
    return order_key(values_of(scores, advantages, mask, segment, length, index, PER_TOKEN))
