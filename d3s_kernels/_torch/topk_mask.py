"""The ops topk_mask, select_tokens and select_tokens_from_logits. They select exactly k values of each segment. Among
equal values, the value with the lower index is selected first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments.bundles import NOTHING, ONE, POOL, ROWS, NumberOrTensor, SegmentArguments
from .._segments.quota import Quota
from .._segments.segments import Segments, advantage_of_each, both, highest_first, pool, segments_of, selected_segments
from .kernels import like, op
from .logprob_entropy import logprob_entropy


class _Top(NamedTuple):
    mask: Tensor  # flat
    k: Tensor  # how many scores of each stretch are selected, including zeros that are dropped later
    order: Tensor


def _select(
    scores: Tensor, mask: Tensor | None, segments: Segments, quota: Quota, drop_zeros: bool, times: int = 1
) -> _Top:
    """Selects the highest scores of each segment. ``scores`` is flat and float32."""
    present = both(scores == scores, mask) & ~segments.left_out()
    k = quota.of(segments.total(present), times=times)
    order, rank = highest_first(scores, present, segments)
    kept = rank < k[segments.segment_ids]
    return _Top(kept & (scores != 0) if drop_zeros else kept, k, order)


def _count_and_threshold(top: _Top, scores: Tensor, segments: Segments, drop_zeros: bool) -> tuple[Tensor, Tensor]:
    """Returns for each segment how many scores are kept, and the lowest kept score (infinite if no score is kept)."""
    count, begin = segments.total(top.mask), segments.edges[:-1]
    in_order = pad(scores[top.order] + 0.0, (1, 0))  # in_order[i]: the i-th score, counted from 1; -0 becomes 0
    lowest = in_order[begin + top.k]
    if drop_zeros:  # if the lowest selected score is 0, only the first `count` scores remain
        lowest = torch.where(lowest == 0, in_order[begin + count], lowest)
    count, lowest = segments.without_ends(count), segments.without_ends(lowest)
    return count.int(), torch.where(count > 0, lowest, math.inf)


@op(like("scores", torch.bool))
def topk_mask(
    scores: Tensor,
    ratio: NumberOrTensor = NOTHING,
    k: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = ROWS,
    drop_zeros: bool = False,
) -> Tensor:
    each, times = selected_segments(scores, segments)
    top = _select(scores.flatten().float(), mask, each, Quota(*ratio, *k), drop_zeros, times)
    return top.mask.view(scores.shape)


def _fake_selection(entropy: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_segments = SegmentArguments(arguments["offsets"], pooled=arguments["pooled"]).shape_in(entropy)
    return (
        entropy.new_empty(entropy.shape, dtype=torch.bool),
        entropy.new_empty(of_segments, dtype=torch.int32),
        entropy.new_empty(of_segments, dtype=torch.float32),
    )


@op(_fake_selection)
def select_tokens(
    entropy: Tensor,
    advantages: Tensor,
    ratio: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = POOL,
    drop_zeros: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = segments_of(entropy, segments.offsets)
    scores = advantage_of_each(advantages, entropy, sequences).abs() * entropy.flatten().float()
    each = pool(entropy) if segments.pooled else sequences
    top = _select(scores, mask, each, Quota(*ratio), drop_zeros)
    count, threshold = _count_and_threshold(top, scores, each, drop_zeros)
    of_segments = segments.shape_in(entropy)
    return top.mask.view(entropy.shape), count.view(of_segments), threshold.view(of_segments)


def _fake_selection_from_logits(logits: Tensor, **more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    entropy = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    chosen, count, threshold = _fake_selection(entropy, **more)
    return chosen, entropy, count, threshold


@op(_fake_selection_from_logits)
def select_tokens_from_logits(
    logits: Tensor,
    advantages: Tensor,
    ratio: NumberOrTensor = NOTHING,
    mask: Tensor | None = None,
    segments: SegmentArguments = POOL,
    drop_zeros: bool = False,
    temperature: NumberOrTensor = ONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, entropy, _, _ = logprob_entropy(logits, None, temperature, mask)
    chosen, count, threshold = select_tokens(entropy, advantages, ratio, mask, segments, drop_zeros)
    return chosen, entropy, count, threshold
