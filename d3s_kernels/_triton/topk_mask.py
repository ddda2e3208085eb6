"""topk_mask and the selection of tokens in Triton: a program for each segment, which it holds in registers.

The bound that the k largest order keys reach is found bit by bit, from the highest bit on: a bit is set if at least k
keys reach the bound with it.

A segment is a row that is short enough, or a whole batch that is. There is no kernel for longer segments, nor for
those of offsets, since only the device knows how long they are: the ops then return NotImplemented.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import EXACT, contiguous, smallest, warps
from .logprob_entropy import row_statistics
from .order_key import ABSENT, NO_KEY, ZERO_KEY, order_key, order_key_value

# The longest segment of a program, and its threads. The registers of a thread hold up to 32 keys.
SIZES = ((1024, 128), (4096, 256), (8192, 512), (16384, 512))
LARGEST = SIZES[-1][0]
DOUBLE_SLACK = tl.constexpr(1 - 2.0**-50)  # 1 - kDoubleSlack and kFloatSlack of csrc/core/quota.h
FLOAT_SLACK = tl.constexpr(1 - 2.0**-21)


@triton.jit
def share(ratio, slack, present):
    """ceil(ratio * present), at least 1 and at most all; 0 for an unchecked ratio that is not valid."""
    wanted = tl.ceil(ratio.to(tl.float64) * present.to(tl.float64) * slack)
    k = tl.where(wanted < present.to(tl.float64), wanted, present.to(tl.float64)).to(tl.int64)
    return tl.where((ratio > 0) & (ratio <= 1), tl.maximum(k, tl.minimum(present, 1)), 0)


@triton.jit
def number(k, present, times):
    """k for each of ``times`` segments, at most all; 0 for an unchecked k below 1."""
    return tl.where(k < 1, 0, tl.minimum(tl.minimum(k, present) * times, present))


@triton.jit
def quota_of(present, ratio_bits, ratio, k, k_tensor, times):
    """How many of a segment's ``present`` values are kept."""
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
def keys_of(scores, advantages, mask, index, inside, PER_TOKEN: tl.constexpr):
    """The order keys of a segment's scores, or of |A| * H. Scores in int32 are keys already."""
    value = tl.load(scores + index, mask=inside, other=0)
    if scores.dtype.element_ty == tl.int32:
        key = value.to(tl.uint32, bitcast=True)
    else:
        value = value.to(tl.float32)
        if advantages is not None:
            if PER_TOKEN:
                advantage = tl.load(advantages + index, mask=inside, other=0.0)
            else:
                advantage = tl.load(advantages)
            value = tl.abs(advantage) * value
        key = order_key(value)
    if mask is not None:
        inside = inside & (tl.load(mask + index, mask=inside, other=0) != 0)
    return tl.where(inside, key, ABSENT)


@triton.jit(do_not_specialize=["ratio_bits", "k", "times"])
def select_top(
    scores, advantages, mask, length, ratio_bits, ratio, k, k_tensor, times, out, counts, thresholds,
    PER_TOKEN: tl.constexpr, DROP_ZEROS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    scores += segment * length
    out += segment * length
    if advantages is not None:
        advantages += segment * (length if PER_TOKEN else 1)
    if mask is not None:
        mask += segment * length
    index = tl.arange(0, SIZE)
    inside = index < length
    keys = keys_of(scores, advantages, mask, index, inside, PER_TOKEN)
    present = tl.sum((keys != ABSENT).to(tl.int32), 0)
    kept = quota_of(present, ratio_bits, ratio, k, k_tensor, times).to(tl.int32)
    bound = lower_bound(keys, present, kept)
    if counts is not None:
        reaching = keys >= tl.maximum(bound, 1)  # without absent values
        if DROP_ZEROS:
            reaching = reaching & (keys != ZERO_KEY)
        lowest = order_key_value(tl.min(tl.where(reaching, keys, NO_KEY), 0))
    # All keys above the bound are kept, and the first ones of those that equal it.
    above = keys > bound
    ties = (keys == bound).to(tl.int32)
    wanted = kept - tl.sum(above.to(tl.int32), 0)
    chosen = above | ((ties == 1) & (tl.cumsum(ties, 0) <= wanted))
    if DROP_ZEROS:
        chosen = chosen & (keys != ZERO_KEY)
        kept = tl.sum(chosen.to(tl.int32), 0)
    tl.store(out + index, chosen, mask=inside)
    if counts is not None:
        tl.store(counts + segment, kept)
        tl.store(thresholds + segment, tl.where(kept > 0, lowest, float("inf")))


@triton.jit
def lower_bound(keys, present, kept):
    """A bound that exactly ``kept`` keys reach or, where keys tie, the key of the tie; found bit by bit.

    The search skips the bits that all keys share, and stops as soon as exactly ``kept`` keys reach the bound.
    """
    highest = tl.max(keys, 0)
    differing = highest ^ tl.min(tl.where(keys == ABSENT, NO_KEY, keys), 0)
    for shift in tl.static_range(5):
        differing |= differing >> (1 << shift)
    bound = highest ^ (highest & differing)  # ~differing fails in the interpreter of Triton 3.7 with NumPy 2
    bit = differing - (differing >> 1)
    reached = present
    while (bit != 0) & (reached != kept):
        candidate = bound | bit
        count = tl.sum((keys >= candidate).to(tl.int32), 0)
        bound = tl.where(count >= kept, candidate, bound)
        reached = tl.where(count >= kept, count, reached)
        bit = bit >> 1
    return bound


def _fits(shape: torch.Size, pooled: bool, offsets: Tensor | None) -> bool:
    return offsets is None and (shape.numel() if pooled else shape[-1]) <= LARGEST


def _select(
    scores: Tensor,
    shape: torch.Size,
    pooled: bool,
    drop_zeros: bool,
    mask: Tensor | None,
    quota: dict[str, Any],
    advantages: Tensor | None = None,
    with_counts: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The mask of segments that fit a program; count and threshold of each."""
    device, segments = scores.device, torch.Size(()) if pooled else shape[:-1]
    out = torch.empty(shape, dtype=torch.bool, device=device)
    counts = torch.empty(segments, dtype=torch.int32, device=device) if with_counts else None
    thresholds = torch.empty(segments, dtype=torch.float32, device=device) if with_counts else None
    if segments.numel():
        length = shape.numel() // segments.numel()
        size, threads = smallest(SIZES, length)
        per_token = advantages is not None and advantages.dim() > 0 and advantages.shape != segments
        if advantages is not None:
            advantages = _spread(advantages, shape if per_token else segments)
        select_top[(segments.numel(),)](
            scores, advantages, contiguous(mask), length, out=out, counts=counts, thresholds=thresholds, **quota,
            PER_TOKEN=per_token, DROP_ZEROS=drop_zeros, SIZE=size, num_warps=warps(threads), **EXACT,
        )  # fmt: skip
    return out, counts, thresholds


def _spread(advantages: Tensor, shape: torch.Size) -> Tensor:
    """The advantages expanded to ``shape``: one for each token, or one for each row."""
    if advantages.dim() == len(shape) - 1:
        advantages = advantages.unsqueeze(-1)
    return advantages.expand(shape).contiguous()


def _quota(
    ratio: float | None,
    ratio_tensor: Tensor | None,
    k: int | None = None,
    k_tensor: Tensor | None = None,
    times: int = 1,
) -> dict[str, Any]:
    """The quota as kernel arguments. A ratio that is a number is passed as its bits, since no kernel takes a float."""
    (bits,) = struct.unpack("q", struct.pack("d", ratio or 0.0))
    return {"ratio_bits": bits, "ratio": ratio_tensor, "k": k, "k_tensor": k_tensor, "times": times}


# ---- the ops --------------------------------------------------------------------------------------------------------


def topk_mask(
    scores: Tensor,
    ratio: float | None = None,
    ratio_tensor: Tensor | None = None,
    k: int | None = None,
    k_tensor: Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    pooled: bool = False,
    drop_zeros: bool = False,
) -> Any:
    if not _fits(scores.shape, pooled, offsets):
        return NotImplemented
    quota = _quota(ratio, ratio_tensor, k, k_tensor, scores.shape[:-1].numel() if pooled else 1)
    return _select(scores.contiguous(), scores.shape, pooled, drop_zeros, mask, quota, with_counts=False)[0]


def select_tokens(
    entropy: Tensor,
    advantages: Tensor,
    ratio: float | None = None,
    ratio_tensor: Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    pooled: bool = True,
    drop_zeros: bool = False,
) -> Any:
    if not _fits(entropy.shape, pooled, offsets):
        return NotImplemented
    quota = _quota(ratio, ratio_tensor)
    return _select(entropy.contiguous(), entropy.shape, pooled, drop_zeros, mask, quota, advantages)


def select_tokens_from_logits(
    logits: Tensor,
    advantages: Tensor,
    ratio: float | None = None,
    ratio_tensor: Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    pooled: bool = True,
    drop_zeros: bool = False,
    sampling_ids: Tensor | None = None,
    sampling_offsets: Tensor | None = None,
    max_dense_rows: int | None = None,
) -> Any:
    shape = logits.shape[:-1]
    of_rows = None, temperature, temperature_tensor, mask
    if sampling_ids is not None or not _fits(shape, pooled, offsets):
        entropy = torch.ops.d3s_kernels.logprob_entropy.default(
            logits, *of_rows, sampling_ids, sampling_offsets, False, max_dense_rows
        )[1]
        chosen, count, threshold = torch.ops.d3s_kernels.select_tokens.default(
            entropy, advantages, ratio, ratio_tensor, mask, offsets, max_segment, pooled, drop_zeros
        )
        return chosen, entropy, count, threshold
    # One kernel writes keys and entropies, so that no other kernel reads entropies, mask and advantages again.
    keys = torch.empty(shape, dtype=torch.int32, device=logits.device)
    each = shape.numel() // max(1, advantages.numel())
    entropy = row_statistics(
        logits, *of_rows, keys=keys, advantages=advantages.contiguous(), tokens_per_advantage=max(1, each)
    )[1]
    chosen, counts, thresholds = _select(keys, shape, pooled, drop_zeros, None, _quota(ratio, ratio_tensor))
    return chosen, entropy, counts, thresholds
