"""Computes importance ratios of tokens, sequences and groups of tokens, and ESPO's clip ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._arguments.checks import (
    as_float32,
    checked_mask,
    require_no_tangent,
    require_number,
    require_optional_tensors,
    require_scope,
    require_segments,
    require_tensors,
    require_whole,
)
from .._dispatch import ops

_LOG_BOUNDS_OF_TOKENS = (-20.0, 20.0)
_LOG_BOUNDS_OF_MEANS = (-torch.inf, 10.0)


def importance_ratio(
    logprob: Tensor,
    old_logprob: Tensor,
    mask: Tensor | None = None,
    *,
    level: Literal["token", "sequence", "entropy_group"] = "token",
    groups: Tensor | None = None,
    denominator: Literal["self", "old"] = "self",
    log_bounds: tuple[float, float] | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Returns the importance ratio of every token, for the loss of GRPO, GSPO or ESPO. Differentiable in ``logprob``.

    Here ``w_t = pi(y_t) / pi_old(y_t)``, sg[x] is x without a gradient, and means are over unmasked tokens::

        level "token"           w_t                                              (PPO, GRPO)
        level "sequence"        sg[s] pi(y_t) / sg[pi(y_t)],  s = exp(mean log w of the sequence)
                                                                  (GSPO-token, arXiv 2507.18071, eq. 7 and 14)
        level "entropy_group"   as above, but s is over the token's group within its sequence
                                                                  (ESPO, arXiv 2512.00499, eq. 9 and 10)

    At the levels "sequence" and "entropy_group", the ratios of all tokens of a sequence (or group) have the value s.
    But each token has its own gradient: the derivative of the token's ratio with respect to the token's log-probability
    is the ratio. If all tokens of a sequence have the same advantage, and the loss is a mean over the sequence's
    tokens, then the loss with level "sequence" equals GSPO's loss in value, clipping and gradient. A token that a
    selection drops from the loss still counts in s, as long as it is in ``mask``. ``denominator="old"`` multiplies s by
    ``pi(y_t) / sg[pi_old(y_t)]``, so that the value of the ratio is ``s w_t``: this is ESPO's eq. 9 as printed.
    However, the narrow clip ranges in the paper fit the default, ``denominator="self"``. The authors published no code.

    Means are bitwise equal for padded and packed tokens, and on CPU and GPU, because log-ratios are rounded to
    multiples of 2^-26 before they are added. A log-ratio of magnitude 4096 or more counts as infinite. If no
    log-probability has changed, all ratios are exactly 1. A token whose incoming gradient is 0, such as a clipped
    token, gets gradient 0, even if the token's ratio is infinite or NaN.

    Args:
        logprob: ``[..., T]``, each row is a sequence; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        old_logprob: the same shape; treated as a constant.
        mask: bool, or integer (0 means False), the shape of ``logprob``. Tokens where the mask is False are not read;
            they have ratio 1 and gradient 0.
        level: the tokens that a ratio is computed over: the token itself, its sequence, or its group.
        groups: int8, the shape of ``logprob``, only for level "entropy_group": the group of each token, 0 to 15. A
            token with a value below 0 is in no group and is treated as masked. :func:`entropy_groups` computes
            ``groups``.
        denominator: the denominator of the token's own factor: "self" for sg[pi], "old" for sg[pi_old]. Level "token"
            ignores this argument.
        log_bounds: (low, high). The logarithm of a ratio is clamped to this range; outside of it, the gradient is 0.
            None means verl's bounds: (-20, 20) at level "token", (-inf, 10) at the other levels. TRL does not clamp,
            which is (-inf, inf).
        offsets: int32 or int64 ``[S + 1]``, from 0 to N.

    Returns:
        float32, the shape of ``logprob``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, offsets, level or denominator; groups at another level, or
            level "entropy_group" without groups; a lower bound that is not below 0, or an upper bound that is not above
            0.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> old, new = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-0.9, -2.3, -0.5]])
        >>> d3s.importance_ratio(new, old)
        tensor([[1.1052, 0.7408, 1.0000]])
        >>> d3s.importance_ratio(new, old, torch.tensor([[True, True, False]]), level="sequence")
        tensor([[0.9048, 0.9048, 1.0000]])
    """
    require_tensors(logprob=logprob, old_logprob=old_logprob)
    require_no_tangent(logprob=logprob)
    if groups is not None or offsets is not None:
        require_optional_tensors(logprob, groups=groups, offsets=offsets)
    mask = checked_mask(mask, logprob)
    if not isinstance(level, str) or not isinstance(denominator, str):
        name, word = ("denominator", denominator) if isinstance(level, str) else ("level", level)
        raise TypeError(f"{name}: got {word!r}; takes a word")
    if log_bounds is None:
        log_bounds = _LOG_BOUNDS_OF_TOKENS if level == "token" else _LOG_BOUNDS_OF_MEANS
    elif not isinstance(log_bounds, (tuple, list)) or len(log_bounds) != 2:
        raise TypeError(f"log_bounds: got {log_bounds!r}; takes two numbers, (low, high)")
    elif None in log_bounds:
        raise TypeError(f"log_bounds: got {log_bounds!r}; takes two numbers, -inf or inf for no bound")
    else:
        for bound in log_bounds:
            require_number(log_bounds=bound)
    low, high = log_bounds
    old = old_logprob.detach() if old_logprob.requires_grad else old_logprob
    return ops.importance_ratio(
        as_float32("logprob", logprob), as_float32("old_logprob", old), mask, groups, offsets, level,
        denominator, low, high,
    )  # fmt: skip


def entropy_groups(
    entropy: Tensor,
    mask: Tensor | None = None,
    quantiles: Sequence[float] = (0.8,),
    *,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    scope: Literal["sequence", "batch"] = "sequence",
) -> Tensor:
    """Returns groups of tokens with similar entropies, for ESPO (arXiv 2512.00499, eq. 7).

    Each quantile q makes a cut: the share ``1 - q`` of the tokens, namely the tokens with the highest entropies, is
    above the cut. The number of the tokens above a cut is rounded as in :func:`topk_mask`. If entropies tie at the cut,
    tokens with lower indices are above the cut. A token's group is the number of cuts that are below the token. The
    paper does not say how its ranges of entropy are set. In the paper's ablation, one group of the highest 20 % is
    best; this is the default.

    Args:
        entropy: ``[..., T]``, each row is a sequence; or ``[N]`` with ``offsets``. float32, bfloat16 or float16. The
            paper uses the entropy of the old policy.
        mask: bool, or integer (0 means False), the shape of ``entropy``: True at the tokens of the completion.
        quantiles: at most 15 numbers in (0, 1), ascending.
        offsets: int32 or int64 ``[S + 1]``, from 0 to N.
        max_segment: the caller's upper bound on the length of a sequence; an optional hint for GPUs.
        scope: "sequence" computes the quantiles within each sequence, "batch" over all tokens.

    Returns:
        int8, the shape of ``entropy``: 0 for the lowest entropies, up to the number of quantiles; -1 outside the mask,
        and where the entropy is NaN. No gradient.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, offsets or scope, or wrong quantiles.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.entropy_groups(torch.tensor([[0.1, 2.0, 0.3, 0.0, 0.2]]), quantiles=(0.4, 0.8))
        tensor([[0, 2, 1, 0, 1]], dtype=torch.int8)
    """
    require_tensors(entropy=entropy)
    segments = offsets, max_segment, require_scope(scope, "sequence")
    require_segments(entropy, segments)
    mask = checked_mask(mask, entropy)
    # The usual types first: to ask an abstract class takes longer.
    listed = type(quantiles) in (tuple, list) or (isinstance(quantiles, Sequence) and not isinstance(quantiles, str))
    if not listed:
        raise TypeError(f"quantiles: got {type(quantiles).__name__}; takes a sequence of numbers")
    for quantile in quantiles:
        if type(quantile) is not float:
            require_number(quantiles=quantile)
    return ops.entropy_groups(as_float32("entropy", entropy), list(quantiles), mask, *segments)


def adaptive_clip(
    entropy: Tensor,
    groups: Tensor,
    mask: Tensor | None = None,
    *,
    vocab_size: int,
    alpha: float = 0.02,
    offsets: Tensor | None = None,
) -> Tensor:
    """Returns ESPO's epsilon (arXiv 2512.00499, eq. 8): how far a token's ratio may be from 1 before the ratio is
    clipped.

    Epsilon is ``alpha / log(vocab_size)`` times the mean entropy of the token's group within the token's sequence. So
    the ratios of a group of uncertain tokens may move further from 1. The formula in the paper divides the entropy of
    one token by the number of tokens. But the text of the paper describes the average normalised entropy of the group.
    This function computes that average. Means are exact and reproducible, as in :func:`importance_ratio`.

    Args:
        entropy: ``[..., T]``, nats, each row is a sequence; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        groups: int8, the shape of ``entropy``: the group of each token, 0 to 15; below 0 if the token is in no group.
        mask: bool, or integer (0 means False), the shape of ``entropy``.
        vocab_size: the size of the policy's vocabulary; its logarithm is the largest possible entropy.
        alpha: the epsilon of a group that has the largest possible entropy. In the paper's ablation, 0.02 is best.
        offsets: int32 or int64 ``[S + 1]``, from 0 to N.

    Returns:
        float32, the shape of ``entropy``: the epsilon of each token, whose ratio has the range
        ``[1 - epsilon, 1 + epsilon]``; 0 for tokens that are in no group or outside the mask. No gradient.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or offsets; a ``vocab_size`` below 2; an ``alpha`` that is
            not above 0.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> entropy = torch.tensor([[0.02, 1.2, 0.02]])
        >>> d3s.adaptive_clip(entropy, torch.tensor([[0, 1, 0]], dtype=torch.int8), vocab_size=151_936)
        tensor([[3.3525e-05, 2.0115e-03, 3.3525e-05]])
    """
    require_tensors(entropy=entropy, groups=groups)
    if offsets is not None:
        require_optional_tensors(entropy, offsets=offsets)
    mask = checked_mask(mask, entropy)
    if vocab_size is None:
        raise TypeError("vocab_size: got None; takes a whole number")
    require_whole(vocab_size=vocab_size)
    require_number(alpha=alpha)
    return ops.adaptive_clip(as_float32("entropy", entropy), groups, mask, offsets, vocab_size, alpha)


class EspoTerms(NamedTuple):
    """The result of :func:`espo_terms`: three tensors, float32 ``[B, T]``. Only ``ratio`` has a gradient, with respect
    to ``logprob``.
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
    vocab_size: int,
    quantiles: Sequence[float] = (0.8,),
    alpha: float = 0.02,
    denominator: Literal["self", "old"] = "self",
) -> EspoTerms:
    """Returns the terms of ESPO's objective (arXiv 2512.00499, eq. 5), for a loss that is a mean over a sequence's
    tokens.

    Eq. 5 averages ``min(s A, clip(s, 1 - epsilon, 1 + epsilon) A)`` over the tokens of each group, and then over the
    groups of the sequence. Your loss averages over the tokens of the sequence instead. With a weight for each token,
    the result is the same: in a sequence of n tokens and K groups, a token in a group of m tokens has the weight
    ``n / (K m)``. K counts only groups that have a token.

    Args:
        logprob: ``[B, T]``, float32, bfloat16 or float16.
        old_logprob: the same shape; treated as a constant.
        entropy: the same shape: the entropy of the old policy, in nats. A token with a NaN entropy is in no group.
        mask: bool, the same shape: True at the tokens of the completions.
        quantiles: as in :func:`entropy_groups`.
        alpha, vocab_size: as in :func:`adaptive_clip`.
        denominator: as in :func:`importance_ratio`.

    Returns:
        For each token: ``ratio``, the ratio of the token's group, with the token's own gradient; ``epsilon``, the
        epsilon of the group; ``weight``, the weight of the token. A token outside the mask or in no group has ratio 1
        without a gradient, epsilon 0 and weight 0.

    Raises:
        ValueError, TypeError: as :func:`entropy_groups`, :func:`importance_ratio` and :func:`adaptive_clip`.

    Example:
        >>> import torch
        >>> from d3s_kernels.off_policy.importance_ratio import espo_terms
        >>> logprob, entropy = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[0.1, 2.0, 0.3]])
        >>> terms = espo_terms(logprob, logprob - 0.1, entropy, torch.ones(1, 3, dtype=torch.bool), vocab_size=8)
        >>> terms.ratio, terms.weight
        (tensor([[1.1052, 1.1052, 1.1052]]), tensor([[0.7500, 1.5000, 0.7500]]))
    """
    groups = entropy_groups(entropy, mask, quantiles)
    ratio = importance_ratio(logprob, old_logprob, mask, level="entropy_group", groups=groups, denominator=denominator)
    epsilon = adaptive_clip(entropy, groups, mask, vocab_size=vocab_size, alpha=alpha)
    sizes = torch.stack([(groups == group).sum(-1) for group in range(len(quantiles) + 1)], -1)
    size_of_each = sizes.gather(-1, groups.clamp(min=0).long())
    weight = mask.sum(-1, keepdim=True) / ((sizes > 0).sum(-1, keepdim=True) * size_of_each)
    return EspoTerms(ratio, epsilon, weight.float().masked_fill(groups < 0, 0.0))
