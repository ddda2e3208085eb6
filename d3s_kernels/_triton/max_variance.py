"""max_variance_select in Triton. Each group has its own program, which sorts the group in registers.

A group is a row or, if the segments are pooled, the whole batch. For long groups and for offsets, the op returns
NotImplemented.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._arguments.bundles import NOTHING, ROWS, NumberOrTensor, SegmentArguments
from .launch import EXACT, contiguous, smallest, warps
from .order_key import order_key
from .token_keys import number

# One pair for each program size: the maximum length of a group, and the number of threads.
SIZES = ((64, 32), (256, 64), (1024, 128))
LARGEST = SIZES[-1][0]
LAST = tl.constexpr(0x7FFFFFFF)  # sorts unusable values after all others


@triton.jit
def sum_of_first(sums, count, SIZE: tl.constexpr):
    """Returns the sum of the first ``count`` values. ``sums`` has the cumulative sums of the values."""
    return tl.where(count > 0, tl.gather(sums, tl.maximum(count, 1) - 1, 0), 0.0)


@triton.jit(do_not_specialize=["keep", "times"])
def select_most_varied(
    values, mask, length, keep, keep_tensor, times, out, SIZE: tl.constexpr,
):  # fmt: skip
    """Marks the k values with the largest variance. In sorted order, these are the first i and the last k - i values,
    for some i in 0..k. All i are tried (``csrc/core/split_scan.h``).
    """
    segment = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < length
    value = tl.load(values + segment * length + index, mask=inside, other=0.0).to(tl.float32)
    usable = inside & (tl.abs(value) < float("inf"))
    if mask is not None:
        usable = usable & (tl.load(mask + segment * length + index, mask=inside, other=0) != 0)
    n = tl.sum(usable.to(tl.int32), 0)
    if keep_tensor is not None:
        k = number(tl.load(keep_tensor).to(tl.int64), n.to(tl.int64), times).to(tl.int32)
    else:
        k = number(keep + 0 * n.to(tl.int64), n.to(tl.int64), times).to(tl.int32)

    # Sort by value, then by index. One 64-bit integer holds both.
    order = order_key(value).to(tl.int32, bitcast=True) ^ -0x80000000
    order = tl.sort((tl.where(usable, order, LAST).to(tl.int64) << 32) | index)
    place = (order & 0xFFFFFFFF).to(tl.int32)
    bits = (order >> 32).to(tl.int32)
    x = tl.where(bits < 0, ~(bits ^ -0x80000000), bits).to(tl.float32, bitcast=True).to(tl.float64)
    rank = index
    # Subtract the median, since large values with small differences would cancel.
    x = tl.where(rank < n, x, 0.0)
    x = tl.where(rank < n, x - tl.sum(tl.where(rank == n // 2, x, 0.0), 0), 0.0)

    # For every i, compute the sums of the first i and of the last k - i values.
    low = rank  # i = 0 .. SIZE - 1; a group that is kept whole needs no split
    high = k - low
    last = tl.maximum(n - high, 0)
    candidate = low <= tl.where(n > k, k, -1)
    sum_low = sum_of_first(tl.cumsum(x, 0), low, SIZE)
    square_low = sum_of_first(tl.cumsum(x * x, 0), low, SIZE)
    from_last = tl.minimum(last, SIZE - 1)
    sum_high = tl.where(high > 0, tl.gather(tl.cumsum(x, 0, reverse=True), from_last, 0), 0.0)
    square_high = tl.where(high > 0, tl.gather(tl.cumsum(x * x, 0, reverse=True), from_last, 0), 0.0)
    total = sum_low + sum_high
    spread = k.to(tl.float64) * (square_low + square_high) - total * total
    best = tl.max(tl.where(candidate, spread, float("-inf")), 0)
    # Among splits that are equal up to rounding, choose the split that takes the fewest of the largest values.
    good = candidate & (spread >= best * (1.0 - 1e-12))
    i = tl.max(tl.where(good, low, 0), 0)
    from_below = tl.where(n > k, i, n)
    chosen = (rank < tl.where(k > 0, n, 0)) & ((rank < from_below) | (rank >= n - (k - i)))
    tl.store(out + segment * length + place, chosen, mask=place < length)


def max_variance_select(
    values: Tensor,
    keep: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = ROWS,
) -> Any:
    length = values.numel() if segments.pooled else values.shape[-1]
    if segments.offsets is not None or length > LARGEST:
        return NotImplemented
    out = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    if values.numel():
        size, threads = smallest(SIZES, length)
        times = values.shape[:-1].numel() if segments.pooled else 1
        select_most_varied[(values.numel() // length,)](
            values.contiguous(), contiguous(mask), length, *keep, times, out, SIZE=size,
            num_warps=warps(threads), **EXACT,
        )  # fmt: skip
    return out
