"""The per-token terms of ESPO's loss, for any trainer: ratio, clip range and weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..ratios import adaptive_clip, entropy_groups, importance_ratio
from ..selection_options import Takes


def _are_quantiles(value: Any) -> bool:
    if not isinstance(value, Sequence) or not all(type(cut) in (int, float) and 0 < cut < 1 for cut in value):
        return False
    return list(value) == sorted(set(value)) and len(value) <= 15


QUANTILES = Takes(_are_quantiles, "rising numbers in (0, 1), at most 15")
ALPHA = Takes(lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0")


class EspoTerms(NamedTuple):
    """What :func:`espo_terms` returns: float32 ``[B, T]`` each. Only ``ratio`` has a gradient, with respect to
    ``logprob``.
    """

    ratio: Tensor
    epsilon: Tensor
    weight: Tensor


def espo_terms(
    logprob: Tensor,
    old_logprob: Tensor,
    entropy: Tensor,
    mask: Tensor,
    *,
    quantiles: Sequence[float],
    alpha: float,
    denominator: Literal["self", "old"],
    vocab_size: int,
) -> EspoTerms:
    """The terms of ESPO's objective (arXiv 2512.00499, eq. 5), for a loss that takes the mean over a sequence's tokens.

    Eq. 5 averages ``min(s A, clip(s, 1 - epsilon, 1 + epsilon) A)`` over the tokens of each group, and then over the
    groups of the sequence. The loss averages over the tokens of the sequence instead. The result is the same if each
    token is weighted: in a sequence of n tokens and K groups, a token in a group of m tokens has the weight
    ``n / (K m)``. K counts only groups that have a token.

    Args:
        logprob: ``[B, T]``, float32, bfloat16 or float16.
        old_logprob: the same shape; a constant.
        entropy: the same shape: the entropy of the old policy, in nats. A token with a NaN entropy is in no group.
        mask: bool, the same shape: true at the tokens of the completions.
        quantiles: as in :func:`d3s_kernels.entropy_groups`.
        alpha, vocab_size: as in :func:`d3s_kernels.adaptive_clip`.
        denominator: as in :func:`d3s_kernels.importance_ratio`.

    Returns:
        For each token: the ratio of its group, with the token's share of the gradient; the epsilon of its group; its
        weight. Outside the mask, and for a token in no group: 1 without a gradient, 0 and 0.

    Raises:
        ValueError, TypeError: as the three functions above.
    """
    groups = entropy_groups(entropy, mask, quantiles)
    ratio = importance_ratio(logprob, old_logprob, mask, level="entropy_group", groups=groups, denominator=denominator)
    epsilon = adaptive_clip(entropy, groups, mask, vocab_size=vocab_size, alpha=alpha)
    return EspoTerms(ratio, epsilon, _weight(groups, mask, len(quantiles) + 1))


def _weight(groups: Tensor, mask: Tensor, count: int) -> Tensor:
    sizes = torch.stack([(groups == group).sum(-1) for group in range(count)], -1)
    size = sizes.gather(-1, groups.clamp(min=0).long())
    weight = mask.sum(-1, keepdim=True) / ((sizes > 0).sum(-1, keepdim=True) * size)
    return weight.float().masked_fill(groups < 0, 0.0)
