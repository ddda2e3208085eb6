"""topk_mask and the selection of tokens in Triton. Each segment has its own program.

A segment of up to 16,384 values is held in registers. The program then guesses a bound, counts the values that reach
the bound, and makes the next guess from the counts, until exactly k values reach the bound. A longer segment is read
five times, part by part. Four passes find the bound from histograms, each over 8 bits of the order keys, as in
``csrc/cuda/key_search.h``. The fifth pass writes the mask.

A segment is a row or, if the segments are pooled, the whole batch. The ops return NotImplemented in two cases: if
segments are longer than LARGEST, where plain PyTorch is as fast, and if there are offsets, since then only the device
knows the lengths.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._arguments.bundles import (
    NOTHING,
    ONE,
    POOL,
    ROWS,
    NumberOrTensor,
    SegmentArguments,
)
from .launch import EXACT, contiguous, registers, smallest, warps
from .logprob_entropy import row_statistics
from .order_key import ABSENT, NO_KEY, ZERO_KEY, order_key, order_key_value
from .token_keys import keys_of, quota_of, values_of

# The sizes of a program, as pairs: the maximum length of a segment, and the number of threads. A thread has up to 32
# values in registers.
SIZES = ((1024, 128), (4096, 256), (8192, 256), (16384, 512))
PART, THREADS = 4096, 512  # for longer segments: the number of values in a part, and the number of threads
LARGEST = 131_072


@triton.jit(do_not_specialize=["ratio_bits", "k", "times"])
def select_top(
    scores, advantages, mask, length, ratio_bits, ratio, k, k_tensor, times, out, counts, thresholds,
    PER_TOKEN: tl.constexpr, DROP_ZEROS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    out += segment * length
    index = tl.arange(0, SIZE)
    values = values_of(scores, advantages, mask, segment, length, index, PER_TOKEN)
    present = number_of(values == values)
    kept = quota_of(present.to(tl.int32), ratio_bits, ratio, k, k_tensor, times).to(tl.float32)
    bound, reached = lower_bound(values, present, kept)
    ranks = values
    if reached != kept:  # several values equal the bound, and the first of them are kept
        ranks = tl.where(values == bound, -index.to(tl.float32), float("nan"))
        ranks = tl.where(values > bound, float("inf"), ranks)
        bound, reached = lower_bound(ranks, reached, kept)
    chosen = ranks >= tl.where(kept > 0, bound, float("nan"))  # an unchecked quota may keep nothing
    if DROP_ZEROS:
        chosen = chosen & (values != 0)
    # Without max_contiguous, a thread would store 16 neighbouring values, and would also load them as neighbours. The
    # loads of a warp would then not be coalesced.
    tl.store(tl.max_contiguous(out + index, 4), chosen, mask=index < length)
    if counts is not None:
        tl.store(counts + segment, number_of(chosen).to(tl.int32))
        lowest = tl.min(tl.where(chosen, values, float("inf")), 0)
        tl.store(thresholds + segment, tl.where(lowest == 0, 0.0, lowest))  # never -0


@triton.jit
def number_of(true):
    """Returns how many elements are true, as a float: on NVIDIA GPUs, a comparison yields 0.0 or 1.0 directly, while an
    integer would need a select.
    """
    return tl.sum(tl.where(true, 1.0, 0.0), 0)


@triton.jit
def lower_bound(values, present, kept):
    """Returns a bound that exactly ``kept`` values reach, and how many values reach it. If ties make this impossible,
    the bound is the value of the tie.

    The key of the bound is always in low .. high - 1. A guess is the key at which the bound would be if the values in
    this range were evenly spread, moved a little towards the middle of the range. So in most cases the smaller part of
    the range is left. The new range never has more than ``half`` keys. Since each guess halves ``half``, the search
    ends after at most 32 guesses.
    """
    low = order_key(tl.min(values, 0))
    high = order_key(tl.max(values, 0)) + 1
    reached = present
    above = tl.zeros((), tl.float32)
    half = tl.full((), 1 << 31, tl.uint32)
    while (high - low > 1) & (reached != kept):
        width = high - low
        share = 0.05 + 0.9 * (reached - kept + 0.5) / (reached - above + 1)
        step = tl.minimum((width.to(tl.float32) * share).to(tl.uint32), tl.minimum(half, width - 1))
        step = tl.maximum(step, tl.maximum(width - tl.minimum(half, width), 1))
        count = number_of(values >= order_key_value(low + step))
        enough = count >= kept
        reached = tl.where(enough, count, reached)
        above = tl.where(enough, above, count)
        high = tl.where(enough, high, low + step)
        low = tl.where(enough, low + step, low)
        half = half >> 1
    return order_key_value(low), reached


@triton.jit(do_not_specialize=["ratio_bits", "k", "times"])
def select_top_in_parts(
    scores, advantages, mask, length, ratio_bits, ratio, k, k_tensor, times, out, counts, thresholds,
    PER_TOKEN: tl.constexpr, DROP_ZEROS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    out += segment * length
    digits = tl.arange(0, 256)
    bound = tl.zeros((), tl.uint32)
    wanted = tl.zeros((), tl.int32)  # how many of the keys with the digits found so far are kept
    for shift in tl.static_range(24, -1, -8):
        histogram = tl.zeros((256,), tl.int32)
        for begin in range(0, length, SIZE):
            index = begin + tl.arange(0, SIZE)
            keys = keys_of(scores, advantages, mask, segment, length, index, PER_TOKEN)
            digit = (keys ^ bound) >> shift  # 256 or more if an earlier digit differs
            counted = (keys != ABSENT) & (digit < 256)
            histogram += tl.histogram(tl.where(counted, digit, 0).to(tl.int32), 256, mask=counted)
        if shift == 24:
            present = tl.sum(histogram, 0)
            wanted += quota_of(present, ratio_bits, ratio, k, k_tensor, times).to(tl.int32)
        reaching = tl.cumsum(histogram, 0, reverse=True)
        found = tl.sum((reaching >= tl.maximum(wanted, 1)).to(tl.int32), 0) - 1  # -1 if nothing is present
        wanted -= tl.sum(tl.where(digits > found, histogram, 0), 0)
        bound |= tl.maximum(found, 0).to(tl.uint32) << shift
    kept = tl.zeros((), tl.int32)
    lowest = tl.full((), NO_KEY, tl.uint32)
    for begin in range(0, length, SIZE):
        index = begin + tl.arange(0, SIZE)
        keys = keys_of(scores, advantages, mask, segment, length, index, PER_TOKEN)
        ties = (keys == bound).to(tl.int32)
        chosen = (keys > bound) | ((ties == 1) & (tl.cumsum(ties, 0) <= wanted))
        if DROP_ZEROS:
            chosen = chosen & (keys != ZERO_KEY)
        wanted -= tl.sum(ties, 0)
        tl.store(out + index, chosen, mask=index < length)
        if counts is not None:
            kept += tl.sum(chosen.to(tl.int32), 0)
            lowest = tl.minimum(lowest, tl.min(tl.where(chosen, keys, NO_KEY), 0))
    if counts is not None:
        tl.store(counts + segment, kept)
        tl.store(thresholds + segment, tl.where(lowest == NO_KEY, float("inf"), order_key_value(lowest)))


def _fits(shape: torch.Size, segments: SegmentArguments) -> bool:
    return segments.offsets is None and (shape.numel() if segments.pooled else shape[-1]) <= LARGEST


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
    """Computes the mask, the counts and the thresholds of all segments. The segments must fit (:func:`_fits`)."""
    device, segments = scores.device, torch.Size(()) if pooled else shape[:-1]
    out = torch.empty(shape, dtype=torch.bool, device=device)
    counts = torch.empty(segments, dtype=torch.int32, device=device) if with_counts else None
    thresholds = torch.empty(segments, dtype=torch.float32, device=device) if with_counts else None
    if segments.numel():
        length = shape.numel() // segments.numel()
        held = length <= SIZES[-1][0]
        size, threads = smallest(SIZES, length) if held else (PART, THREADS)
        # The number of registers is limited, so that four programs of 256 threads share a multiprocessor. With counts
        # or drop_zeros, there is no limit: the kernel then holds values and ranks, and with a limit some of them would
        # have to leave the registers.
        limit = registers(64) if held and not (with_counts or drop_zeros) else {}
        per_token = advantages is not None and advantages.dim() > 0 and advantages.shape != segments
        if advantages is not None:
            advantages = _spread(advantages, shape if per_token else segments)
        (select_top if held else select_top_in_parts)[(segments.numel(),)](
            scores, advantages, contiguous(mask), length, out=out, counts=counts, thresholds=thresholds, **quota,
            PER_TOKEN=per_token, DROP_ZEROS=drop_zeros, SIZE=size, num_warps=warps(threads), **limit, **EXACT,
        )  # fmt: skip
    return out, counts, thresholds


def _spread(advantages: Tensor, shape: torch.Size) -> Tensor:
    """Expands the advantages to ``shape``, which has one element for each token or for each row."""
    if advantages.dim() == len(shape) - 1:
        advantages = advantages.unsqueeze(-1)
    return advantages.expand(shape).contiguous()


def _quota(ratio: NumberOrTensor, k: NumberOrTensor = NOTHING, times: int = 1) -> dict[str, Any]:
    """Returns the quota as kernel arguments. A Python ratio is passed as its bits, since no kernel takes a float."""
    (bits,) = struct.unpack("q", struct.pack("d", ratio.number or 0.0))
    return {"ratio_bits": bits, "ratio": ratio.tensor, "k": k.number, "k_tensor": k.tensor, "times": times}


# ---- the ops --------------------------------------------------------------------------------------------------------


def topk_mask(
    scores: Tensor,
    ratio: NumberOrTensor = NOTHING,
    k: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = ROWS,
    drop_zeros: bool = False,
) -> Any:
    if not _fits(scores.shape, segments):
        return NotImplemented
    quota = _quota(ratio, k, scores.shape[:-1].numel() if segments.pooled else 1)
    return _select(scores.contiguous(), scores.shape, segments.pooled, drop_zeros, mask, quota, with_counts=False)[0]


def select_tokens(
    entropy: Tensor,
    advantages: Tensor,
    ratio: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = POOL,
    drop_zeros: bool = False,
) -> Any:
    if not _fits(entropy.shape, segments):
        return NotImplemented
    quota = _quota(ratio)
    return _select(entropy.contiguous(), entropy.shape, segments.pooled, drop_zeros, mask, quota, advantages)


def select_tokens_from_logits(
    logits: Tensor,
    advantages: Tensor,
    ratio: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = POOL,
    drop_zeros: bool = False,
    temperature: NumberOrTensor = ONE,
) -> Any:
    shape = logits.shape[:-1]
    if not _fits(shape, segments):
        entropy = torch.ops.d3s_kernels.logprob_entropy.default(logits, None, *temperature, mask)[1]
        chosen, count, threshold = torch.ops.d3s_kernels.select_tokens.default(
            entropy, advantages, *ratio, mask, *segments, drop_zeros
        )
        return chosen, entropy, count, threshold
    # One kernel writes both keys and entropies, so that no second kernel has to read entropies, mask and advantages.
    keys = torch.empty(shape, dtype=torch.int32, device=logits.device)
    each = shape.numel() // max(1, advantages.numel())
    entropy = row_statistics(
        logits,
        None,
        temperature,
        mask,
        keys=keys,
        advantages=advantages.contiguous(),
        tokens_per_advantage=max(1, each),
    )[1]
    chosen, counts, thresholds = _select(keys, shape, segments.pooled, drop_zeros, None, _quota(ratio))
    return chosen, entropy, counts, thresholds
