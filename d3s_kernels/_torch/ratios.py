"""The ops importance_ratio, entropy_groups and adaptive_clip, for the weights of tokens in a loss.

Exponentials and means are bitwise equal on every device. They are computed in the same steps as in
csrc/core/exponential.h and csrc/core/exact_sum.h, and each step is rounded separately. A mean does not depend on the
order of its terms.
"""

from __future__ import annotations

import math
from ctypes import c_float

import torch
from torch import Tensor

from .._arguments.bundles import ROWS, SegmentArguments
from .._segments.quota import DOUBLE_SLACK, Quota
from .._segments.segments import Segments, both, highest_first, segments_of, selected_segments
from .kernels import like, op

_MOST_GROUPS = 16  # the maximum number of groups in a sequence
_UNIT = 2.0**-26  # the terms of a mean are rounded to multiples of this unit
_FAR = 4096.0  # terms with at least this absolute value count as infinite
_MAGIC = 12582912.0  # 1.5 * 2^23: adding this number rounds x to an integer, which is then in the low bits of the sum
_MAGIC_BITS = 0x4B400000


@op(like("logprob"))
def importance_ratio(
    logprob: Tensor,
    old_logprob: Tensor,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    offsets: Tensor | None = None,
    level: str = "token",
    denominator: str = "self",
    low: float = -20.0,
    high: float = 20.0,
) -> Tensor:
    present = _in_groups(logprob, mask, groups)
    log_ratio = logprob.flatten() - old_logprob.flatten()
    if level != "token":
        sequences = segments_of(logprob, offsets)
        mean = _group_means(log_ratio, present, groups, sequences)
        log_ratio = mean if denominator == "self" else mean + log_ratio
    ratio = _exponential(log_ratio.clamp(_float32(low), _float32(high))).masked_fill(~present, 1)
    if level != "token":
        ratio = ratio.masked_fill(sequences.left_out(), math.nan)
    return ratio.view(logprob.shape)


@op(like("ratio"))
def importance_ratio_backward(
    grad_ratio: Tensor,
    ratio: Tensor,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    low: float = -20.0,
    high: float = 20.0,
) -> Tensor:
    """Multiplies the incoming gradient by d ratio / d log(ratio). This derivative is the ratio itself, or 0 if the
    ratio is at or beyond a finite bound. An incoming gradient of 0 stays 0 for every ratio, since 0 * inf would be NaN.
    """
    grad, by = grad_ratio.flatten(), ratio.flatten()
    limited = ~_in_groups(ratio, mask, groups)
    # An infinite bound limits nothing, not even a ratio of 0 or of infinity.
    if _float32(low) > -math.inf:
        limited |= by <= _limit(low)
    if _float32(high) < math.inf:
        limited |= by >= _limit(high)
    return torch.where(grad == 0, grad, grad * by).masked_fill(limited, 0).view(ratio.shape)


@op(like("entropy", torch.int8))
def entropy_groups(
    entropy: Tensor,
    quantiles: list[float],
    mask: Tensor | None = None,
    segments: SegmentArguments = ROWS,
) -> Tensor:
    flat, (each, _) = entropy.flatten(), selected_segments(entropy, segments)
    usable = both(flat == flat, mask)
    present = usable & ~each.left_out()
    rank, n = highest_first(flat, present, each).rank, each.total(present)
    groups = torch.zeros_like(flat, dtype=torch.int8)
    for share in (1.0 - quantile for quantile in quantiles):
        # If the share 1 - quantile is small, the quantile's rounding error is large relative to the share.
        groups += rank < Quota(share).of(n, slack=DOUBLE_SLACK / share)[each.segment_ids]
    return groups.masked_fill(~usable, -1).view(entropy.shape)


@op(like("entropy"))
def adaptive_clip(
    entropy: Tensor,
    groups: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    vocab_size: int,
    alpha: float = 0.02,
) -> Tensor:
    sequences, present = segments_of(entropy, offsets), _in_groups(entropy, mask, groups)
    clip = _group_means(entropy.flatten(), present, groups, sequences) * (alpha / math.log(vocab_size))
    return clip.masked_fill(~present, 0).masked_fill(sequences.left_out(), math.nan).view(entropy.shape)


def _in_groups(tokens: Tensor, mask: Tensor | None, groups: Tensor | None) -> Tensor:
    """Returns a flat mask of the tokens that ``mask`` keeps and that are in a group (if there are groups)."""
    some = torch.ones_like(tokens, dtype=torch.bool).flatten() if groups is None else groups.flatten() >= 0
    return both(some, mask)


def _group_means(terms: Tensor, present: Tensor, groups: Tensor | None, sequences: Segments) -> Tensor:
    """Returns for each token the mean of the terms of its sequence or, with groups, of its group within the sequence.
    The mean is NaN for a group id of 16 or above.
    """
    if groups is None:
        return _exact_means(terms, present, sequences.segment_ids, len(sequences.edges) - 1)[sequences.segment_ids]
    ids = groups.flatten().long()
    good = ids < _MOST_GROUPS
    slot = sequences.segment_ids * _MOST_GROUPS + ids.clamp(0, _MOST_GROUPS - 1)
    means = _exact_means(terms, present & good, slot, (len(sequences.edges) - 1) * _MOST_GROUPS)
    return means[slot].masked_fill(~good, math.nan)


def _float32(bound: float) -> float:
    return c_float(bound).value


def _limit(bound: float) -> Tensor:
    """Returns the ratio at a bound of the log-ratio, as a 0-d CPU tensor. Torch compares such a tensor with tensors on
    any device without a host sync.
    """
    return _exponential(torch.full((), _float32(bound), dtype=torch.float32, device="cpu"))


def _exponential(x: Tensor) -> Tensor:
    inside = x.clamp(-104.0, 89.0)  # outside of this range, the result is 0 or infinite; NaN stays NaN
    total = inside * 1.44269504 + _MAGIC
    n = total - _MAGIC
    r = (inside - n * 0.693145752) - n * 1.42860677e-6
    q = torch.full_like(r, 1.374611515e-3)
    for coefficient in (8.371827193e-3, 4.166996479e-2, 1.666648984e-1, 4.999998510e-1):
        q = q * r + coefficient
    e = (r * r * q + r) + 1.0
    power = total.view(torch.int32) - _MAGIC_BITS
    half = power >> 1  # 2^power is split into two factors, since it may not fit in a float32
    return e * _power_of_two(half) * _power_of_two(power - half)


def _power_of_two(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)


def _exact_means(terms: Tensor, present: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Returns the mean of the present terms of each slot. A mean is 0 for a slot without terms, infinite if a term is
    infinite, and NaN if a term is NaN or if both infinities are among the terms.
    """
    far = present & ~(terms.abs() < _FAR)
    units = torch.where(present & ~far, terms, 0).mul_(1 / _UNIT).round().long()
    above, below = far & ~(terms < 0), far & ~(terms > 0)  # NaN counts as both infinities
    rows = torch.stack([units, present.long(), above.long(), below.long()], 1)
    total, count, above, below = rows.new_zeros(slots, 4).index_add_(0, slot, rows).unbind(1)
    mean = total.float() * _UNIT / count.clamp(min=1).float()
    infinite = mean.masked_fill(above > 0, math.inf).masked_fill(below > 0, -math.inf)
    return infinite.masked_fill((above > 0) & (below > 0), math.nan)
