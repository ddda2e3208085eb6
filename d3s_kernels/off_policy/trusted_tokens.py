"""Trusted tokens: tokens whose probability in the trained policy is close to the probability they were sampled with.
One of several published rules decides what counts as close. The mask of the trusted tokens can be computed before the
update, so that the LM head skips all other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from .._arguments.checks import (
    as_float32,
    checked_mask,
    require_number,
    require_optional_tensors,
    require_readable,
    require_rule,
    require_tensors,
)
from .._rules.rules import usable
from .._segments.segments import Segments, advantage_of_each, lowest_first, pool, segments_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .._collectives import Ranks

TrustRule = Literal[
    "token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "geometric_mask", "geometric_truncate",
    "kpop", "opsm", "sequence_error", "m2po",
]  # fmt: skip


class TrustedTokens(NamedTuple):
    """The trusted tokens. All tensors stay on the device."""

    mask: Tensor
    """bool, the shape of the log-probabilities. Pass it as ``mask`` to the LM head and to the choice of tokens."""
    weight: Tensor
    """float32, the same shape: the factor for each token's loss; 0 if the token is not trusted."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """int64, 0-d: the number of trusted tokens."""

    def only(self, tokens: Tensor) -> TrustedTokens:
        """Returns the trusted tokens that are among ``tokens``, bool of the shape of ``mask``. The count of the result
        is the number on this rank only.
        """
        left = self.mask & tokens
        return TrustedTokens(left, self.weight * left, left.sum())


class Row(NamedTuple):
    """A rule: the measure of a token, computed from the logarithms of p and q in float64, and the bounds on the
    measure.
    """

    measure: Callable[[Tensor, Tensor], Tensor]
    # What the bounds apply to: the measure of a token; the sum or the mean of the measures of a sequence; or, for
    # "smallest", the mean of the smallest measures of all sequences together.
    over: Literal["token", "sum", "mean", "smallest"] = "token"
    low: float | None = None  # only for a ratio
    high: float | None = None  # None if the caller must set it
    is_ratio: bool = False  # the measure is the logarithm of a ratio; this ratio is bounded and is the weight
    truncates: bool = False  # ratios are clamped to the bounds, and all tokens are kept
    drops_negative: bool = False  # only sequences with an advantage below 0 are dropped


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_p - log_q


def _two_point_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns the larger of KL(p, q) and KL(q, p) for two outcomes: this token, and all other tokens together. As in
    AReaL, probabilities are kept at least 1e-8 away from 0 and 1. Otherwise a divergence could be infinite, since in
    float32 a nearly certain token has probability 1.
    """
    p, q = (log.exp().clamp(1e-8, 1 - 1e-8) for log in (log_p, log_q))
    apart, others_apart = (p / q).log(), ((1 - p) / (1 - q)).log()
    return torch.maximum(p * apart + (1 - p) * others_apart, -q * apart - (1 - q) * others_apart)


RULES = {
    "token_mask": Row(_log_ratio, low=0.5, high=5.0, is_ratio=True),
    "token_truncate": Row(_log_ratio, low=0.0, high=2.0, is_ratio=True, truncates=True),
    "sequence_mask": Row(_log_ratio, "sum", low=0.0, high=3.0, is_ratio=True),
    "sequence_truncate": Row(_log_ratio, "sum", low=0.0, high=3.0, is_ratio=True, truncates=True),
    "geometric_mask": Row(_log_ratio, "mean", low=0.999, high=1.001, is_ratio=True),
    "geometric_truncate": Row(_log_ratio, "mean", low=0.0, high=2.0, is_ratio=True, truncates=True),
    "kpop": Row(_two_point_divergence, high=2.0),
    "opsm": Row(lambda log_p, log_q: log_q - log_p, "mean", drops_negative=True),
    "sequence_error": Row(lambda log_p, log_q: (log_q - log_p).abs().exp(), "mean", high=2.0),
    "m2po": Row(lambda log_p, log_q: (log_p - log_q).square(), "smallest", high=0.04),
}


@torch.no_grad()
def trusted_tokens(
    logprob: Tensor,
    sampling_logprob: Tensor,
    rule: TrustRule,
    *,
    low: float | None = None,
    high: float | None = None,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
) -> TrustedTokens:
    """Keeps the tokens, or the sequences, whose probability is close to the probability they were sampled with.

    Here p is a token's probability in the trained policy, q is its probability in the policy that sampled it (an
    inference engine, or an earlier policy), and ``r = p / q``. Means and products are over the tokens of a sequence:

    ==================== ================================================= ============ =============================
    ``rule``             keeps                                             low, high    source
    ==================== ================================================= ============ =============================
    "token_mask"         a token iff ``low <= r <= high``                  0.5, 5       IcePop, arXiv 2510.18855
    "sequence_mask"      a sequence iff ``low <= product of r <= high``    0, 3         TRL's default
    "geometric_mask"     the same for the geometric mean of r              0.999, 1.001 verl's "seq_mean_k1"
    "token_truncate",    all tokens; a ratio outside the bounds is set to  0, 2         truncated importance sampling
    "sequence_truncate", the nearer bound                                  0, 3
    "geometric_truncate"                                                   0, 2
    "kpop"               a token iff ``max(KL(p, q), KL(q, p)) <= high``,  2            KPop, in AReaL
                         for the two outcomes "this token" and "another"
    "opsm"               a sequence iff its advantage is at least 0 or     no default   DeepSeek-V3.2, arXiv
                         ``mean(log q - log p) <= high``                                2512.02556, eq. 9
    "sequence_error"     a sequence iff ``mean(exp |log r|) <= high``      2            NeMo-RL's sequence mask
    "m2po"               the tokens with the smallest ``(log r)^2``, as    0.04         M2PO, as in AReaL
                         many as have a mean below ``high``
    ==================== ================================================= ============ =============================

    A token with a NaN, or with a probability of 0 in both policies, is not kept and is left out of all means.
    Everything is computed in float64. The order in which a sequence is summed does not depend on other sequences. For
    "m2po", ties go to the lower index. The result has no gradient.

    Args:
        logprob: log p, ``[..., T]``, each row is a sequence; or ``[N]`` with ``offsets``. float32, bfloat16, float16.
        sampling_logprob: log q, the same shape.
        rule: see the table; ``docs/methods.md`` names the sources that were read.
        low, high: the bounds, instead of the rule's defaults. Bounds are inclusive, except for "m2po". ``low`` is only
            for the first six rules, which bound a ratio. A ``low`` of 0 or a ``high`` of infinity means no bound.
        advantages: required by "opsm": one for each sequence or for each token.
        mask: bool, or integer (0 means False), the shape of ``logprob``. Where the mask is False, nothing is read.
        offsets: int32 or int64 ``[S + 1]``, from 0 to N.
        process_group: the ranks over which "m2po" pools tokens, and over which ``count`` is summed. Every sequence must
            be whole on one rank. All ranks must call this function. With a process group, "m2po" causes a host sync.

    Returns:
        :class:`TrustedTokens`. With the first six rules, the weight of a kept token is the ratio that the rule bounds:
        r of the token, or the product or the geometric mean of r over the token's sequence. With all other rules, the
        weight is 1. A product outside of the range of normal float32 numbers becomes the nearest normal number. A token
        whose weight is 0 or infinite is not kept: only a token that has probability 0 in one of the policies, or a
        ``high`` of 0, can lead to such a weight.

    Raises:
        ValueError, TypeError: an unknown rule; bounds that are missing, negative, or not used by this rule; a wrong
            shape, dtype, device or offsets.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> old, sampled = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.1, -0.2, -0.5]])
        >>> trusted = d3s.trusted_tokens(old, sampled, "token_mask")
        >>> trusted.mask, trusted.weight
        (tensor([[ True, False,  True]]), tensor([[1.1052, 0.0000, 1.0000]]))
    """
    require_rule(rule, tuple(RULES))
    row, (low, high) = RULES[rule], bounds_of(rule, low, high)
    require_tensors(logprob=logprob, sampling_logprob=sampling_logprob)
    others: dict[str, Tensor | None] = {"advantages": advantages, "offsets": offsets}
    require_optional_tensors(logprob, **others)
    require_readable(logprob=logprob, sampling_logprob=sampling_logprob, mask=mask, **others)
    if sampling_logprob.shape != logprob.shape:
        shapes = list(sampling_logprob.shape), list(logprob.shape)
        raise ValueError(f"sampling_logprob: got shape {shapes[0]}; takes that of logprob, {shapes[1]}")
    log_p = as_float32("logprob", logprob).double().flatten()
    log_q = as_float32("sampling_logprob", sampling_logprob).double().flatten()
    known = (log_p - log_q).clamp(-1, 1).float().view(logprob.shape)  # NaN stays NaN
    present = usable(known, checked_mask(mask, logprob), offsets).flatten()  # also checks the arguments
    measure, segments = row.measure(log_p, log_q), segments_of(logprob, offsets)
    if row.over in ("sum", "mean"):
        total = segments.last(segments.scan(torch.where(present, measure, 0.0), torch.add))
        measure = (total / segments.total(present) if row.over == "mean" else total)[segments.segment_ids]
    ranks = None
    if process_group is not None:
        from .._collectives import ranks_of  # here, since some builds of torch have no process groups

        ranks = ranks_of(process_group)
    if row.over == "smallest":
        kept = _smallest(measure.float().masked_fill(~present, torch.nan), high, ranks)
    elif row.truncates:
        kept = present & ~measure.isnan()
    elif row.is_ratio:
        lowest, highest = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
        kept = present & (measure >= lowest) & (measure <= highest)
    else:
        kept = present & (measure <= high)
    if row.drops_negative:
        of_each = _per_token(advantages, logprob, segments)
        kept = (kept | (present & (of_each >= 0))) & ~of_each.isnan()
    weight = kept.float()
    if row.is_ratio:
        # A ratio may be 0 or infinite only if a probability is 0. Other ratios are clamped to the normal numbers of
        # float32.
        ratio, of_float32 = measure.exp(), torch.finfo(torch.float32)
        ratio = torch.where(measure.isfinite(), ratio.clamp(of_float32.tiny, of_float32.max), ratio)
        weight = torch.where(kept, ratio.clamp(low, high), 0.0).float()
        kept = (weight > 0) & (weight < math.inf)
        weight = torch.where(kept, weight, 0.0)
    count = kept.sum() if ranks is None else ranks.add_(kept.sum())
    return TrustedTokens(kept.view(logprob.shape), weight.view(logprob.shape), count)


def weighs(rule: str) -> bool:
    """Returns whether a rule's weights are ratios. ``rule`` may be "none"."""
    return rule in RULES and RULES[rule].is_ratio


def bounds_of(
    rule: str, low: float | None, high: float | None, names: tuple[str, str] = ("low", "high")
) -> tuple[float, float]:
    """Returns the lower and the upper bound: the caller's bounds, or else the defaults of the rule. Error messages call
    the two bounds by ``names``.
    """
    row = RULES[rule]
    for name, value in zip(names, (low, high), strict=True):
        if value is not None:
            require_number(**{name: value})
        if value is not None and not value >= 0:
            raise ValueError(f"{name}: got {value}; takes a number of at least 0")
    if low is not None and not row.is_ratio:
        raise ValueError(f"{names[0]}: got {low} with rule {rule!r}; takes None: the rule has an upper bound alone")
    lowest, highest = (row.low or 0.0) if low is None else low, row.high if high is None else high
    if highest is None:
        raise ValueError(f"{names[1]}: got None with rule {rule!r}, which has no default; takes a number of at least 0")
    if row.is_ratio and lowest > highest:
        raise ValueError(f"{names[1]}: got {highest}; takes a number of at least {names[0]}, {lowest}")
    return lowest, highest


def _per_token(advantages: Tensor | None, logprob: Tensor, segments: Segments) -> Tensor:
    if advantages is None:
        raise ValueError("advantages: got None with rule 'opsm'; takes one for each sequence or for each token")
    if advantages.dim() and advantages.shape != logprob.shape and advantages.numel() != segments.number:
        raise ValueError(
            f"advantages: got shape {list(advantages.shape)}; takes one for each of the {segments.number} sequences, "
            f"or for each token, {list(logprob.shape)}"
        )
    return advantage_of_each(advantages, logprob, segments)


def _smallest(squares: Tensor, high: float, ranks: Ranks | None) -> Tensor:
    """Marks the smallest squares over all ranks: as many as possible while their mean is below ``high``. NaN is not
    marked. When the next larger square is added, the mean never decreases, so the first mean that is not below ``high``
    ends the search.
    """
    if ranks is not None:
        from ..distributed.rollouts import gather

        everyones = gather(ranks, squares, 0, None)
        return _smallest(everyones.values, high, None)[everyones.places]
    segments, present = pool(squares), ~squares.isnan()
    order, rank = lowest_first(squares, present, segments)
    sums = segments.scan(torch.where(present, squares.double(), torch.inf)[order], torch.add)
    number = (sums < high * (torch.arange(len(sums), device=sums.device) + 1)).sum()
    return present & (rank < number)
