"""importance_ratio, entropy_groups, adaptive_clip: the weights of tokens in a loss."""

from __future__ import annotations

import math
from ctypes import c_float

import torch
from torch import Tensor

from .._segments.quota import DOUBLE_SLACK, Quota
from .._segments.segments import Segments, both, highest_first, pool, segments_of
from .._together import ROWS, SegmentArguments
from .exact_sum import exact_means, exponential
from .kernels import like, op

_MOST_GROUPS = 16  # in a sequence


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
    ratio = exponential(log_ratio.clamp(_float32(low), _float32(high))).masked_fill(~present, 1)
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
    """A ratio's derivative by its logarithm is the ratio itself; at a finite bound and beyond, it is 0. A gradient of 0
    stays 0, whatever the ratio is: 0 * inf would be NaN.
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
    flat, each = entropy.flatten(), pool(entropy) if segments.pooled else segments_of(entropy, segments.offsets)
    usable = both(flat == flat, mask)
    present = usable & ~each.left_out()
    rank, n = highest_first(flat, present, each).rank, each.total(present)
    groups = torch.zeros_like(flat, dtype=torch.int8)
    for share in (1.0 - quantile for quantile in quantiles):
        # The share 1 - quantile may be small, and then the quantile's rounding error is larger relative to it.
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
    """A flat mask of the tokens that are unmasked and, if there are groups, in a group."""
    some = torch.ones_like(tokens, dtype=torch.bool).flatten() if groups is None else groups.flatten() >= 0
    return both(some, mask)


def _group_means(terms: Tensor, present: Tensor, groups: Tensor | None, sequences: Segments) -> Tensor:
    """For each token, the mean over its sequence, or over its group in it. NaN for a group id of 16 or above."""
    if groups is None:
        return exact_means(terms, present, sequences.segment_ids, len(sequences.edges) - 1)[sequences.segment_ids]
    ids = groups.flatten().long()
    good = ids < _MOST_GROUPS
    slot = sequences.segment_ids * _MOST_GROUPS + ids.clamp(0, _MOST_GROUPS - 1)
    means = exact_means(terms, present & good, slot, (len(sequences.edges) - 1) * _MOST_GROUPS)
    return means[slot].masked_fill(~good, math.nan)


def _float32(bound: float) -> float:
    return c_float(bound).value


def _limit(bound: float) -> Tensor:
    """The ratio at a bound: a 0-d CPU tensor, which every device can use as a number without waiting."""
    return exponential(torch.full((), _float32(bound), dtype=torch.float32, device="cpu"))
