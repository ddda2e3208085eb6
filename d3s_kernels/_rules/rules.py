"""The rules of the selections: two tables with one row for each rule, and the functions that compute the scores.

Except for :func:`entropy_quantile`, nothing here causes a host sync or loops over segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import SegmentArguments
from .._dispatch import ops
from .._segments.segments import lowest_first, selected_segments

_LOWEST_NORMAL, _INFINITY = 0x00800000, 0x7F800000  # float32 values as bits
_GOLDEN, _WORD = 0x9E3779B9, 0xFFFFFFFF
_ALL = 2**62  # more values than any segment has

# ---- tokens ----------------------------------------------------------------------------------------------------------


class TokenScoring(NamedTuple):
    """The inputs that a rule needs to compute a token's score."""

    reads_entropy: bool = True
    reads_advantages: bool = False
    draws: bool = False  # whether scores are random numbers, drawn from a generator


TOKENS = {
    "advantage_entropy": TokenScoring(reads_advantages=True),
    "entropy": TokenScoring(),
    "advantage": TokenScoring(reads_entropy=False, reads_advantages=True),
    "random": TokenScoring(reads_entropy=False, draws=True),
    "entropy_quantile": TokenScoring(),
}
# The rules that cut each sequence at random, and the rule that then chooses among the tokens before the cuts.
PREFIX_RULES: dict[str, Literal["advantage", "advantage_entropy"]] = {
    "prefix": "advantage",
    "prefix_advantage_entropy": "advantage_entropy",
}
TOKEN_RULES = (*TOKENS, *PREFIX_RULES)


def token_factors(
    rule: str, entropy: Tensor, advantages: Tensor | None, generator: torch.Generator | None, rank: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the values and weights that the op gets as entropies and advantages. So a token's score is
    ``|weight| * value``. A 0-d weight is for all tokens.
    """
    scoring = TOKENS[rule]
    values = entropy if scoring.reads_entropy else torch.ones_like(entropy)
    if scoring.draws:
        return values, random_scores(entropy, generator, rank)
    if not scoring.reads_advantages:
        return values, entropy.new_ones((), dtype=torch.float32)
    assert advantages is not None
    return values, advantages


def entropy_quantile(entropy: Tensor, ratio: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mask, count and threshold of the tokens that TRL's ``top_entropy_quantile`` keeps, bitwise as in TRL."""
    values = entropy.detach().float()
    present = values if mask is None else values[mask]
    threshold = torch.quantile(present, 1 - ratio) if present.numel() else values.new_full((), math.inf)
    kept = values >= threshold if mask is None else (values >= threshold) & mask
    return kept, kept.sum(dtype=torch.int32), threshold


# ---- random numbers --------------------------------------------------------------------------------------------------


def random_scores(like: Tensor, generator: torch.Generator | None, rank: int = 0) -> Tensor:
    """Returns a random float32 score for each value. Scores are independent and identically distributed, so every order
    of the values is equally likely. This also holds for the values of several ranks, even if their generators have the
    same seed.

    Two scores are equal with a probability of about 2^-31; the index then decides. Scores are positive and not
    subnormal, so they sort like their bits, even on devices that flush subnormal numbers to 0.
    """
    drawn: dict[str, Any] = {"dtype": torch.int32, "device": like.device}
    if generator is not None:  # torch.compile accepts no generator, not even None
        drawn["generator"] = generator
    bits = torch.randint(_LOWEST_NORMAL, _INFINITY, like.shape, **drawn)
    if rank > 0:  # other bits in the same range: the drawn bits plus an offset, mixed by MurmurHash3's last steps
        mixed = (bits.long() + rank * _GOLDEN) & _WORD
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & _WORD
        bits = (_LOWEST_NORMAL + ((mixed * (_INFINITY - _LOWEST_NORMAL)) >> 32)).int()
    return bits.view(torch.float32)


# ---- rollouts --------------------------------------------------------------------------------------------------------


class RolloutRow(NamedTuple):
    # A function that computes scores from the values and a generator; the rule keeps the highest scores. For a rule
    # without scores, this is None, and marked_by_rule applies the rule.
    score: Callable[[Tensor, torch.Generator | None], Tensor] | None = None
    draws: bool = False  # whether scores are drawn from the generator


ROLLOUTS = {
    "max_variance": RolloutRow(),
    "highest": RolloutRow(lambda values, _: values),
    "largest_abs": RolloutRow(lambda values, _: values.abs()),
    "percentile": RolloutRow(),
    "random": RolloutRow(random_scores, draws=True),
}
ROLLOUT_RULES = tuple(ROLLOUTS)


def marked_by_rule(rule: str, generator: torch.Generator | None, *arguments: Any) -> Tensor:
    """Marks the rollouts that the rule keeps. ``arguments`` are the arguments of the op ``max_variance_select``."""
    if rule == "max_variance":
        return ops.max_variance_select(*arguments)
    values, keep, keep_tensor, mask, *segments = arguments
    where = SegmentArguments(*segments)
    present = usable(values, mask, where.offsets)
    score = ROLLOUTS[rule].score
    if score is None:
        return _percentile(values, present, at_most(values.numel(), keep, keep_tensor), where)
    return ops.topk_mask(score(values, generator), None, None, keep, keep_tensor, present, *where, False)


def usable(values: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Marks all usable values, by asking max_variance_select to keep more values than any segment has. The op also
    checks the arguments.
    """
    return ops.max_variance_select(values, _ALL, None, mask, offsets, None, False)


def at_most(most: int, keep: int | None, keep_tensor: Tensor | None) -> int | Tensor:
    """Returns the number of values to keep, or ``most`` if that is smaller. So products with the returned number do not
    overflow.
    """
    if keep_tensor is not None:
        return keep_tensor.reshape(()).long().clamp(max=most)
    assert keep is not None
    return min(keep, most)


def _percentile(values: Tensor, present: Tensor, keep: int | Tensor, where: SegmentArguments) -> Tensor:
    """Marks k of the n usable values of each segment: for each i in 0..k - 1, the value whose rank is nearest to (i +
    0.5) / k * (n - 1). Ranks are counted from 0. If two ranks are equally near, the lower rank is taken.

    The i-th kept rank is at most r if (2 i + 1) (n - 1) <= (2 r + 1) k. So the kept ranks up to r can be counted
    without listing them. Rank r is kept if this count increases from r - 1 to r.
    """
    present = present.reshape(-1)
    segments, times = selected_segments(values, where)
    rank = lowest_first(values.reshape(-1).float(), present, segments).rank
    n = segments.total(present)[segments.segment_ids]
    k, span = n.clamp(max=keep * times), (n - 1).clamp(min=1)

    def up_to(r: Tensor) -> Tensor:
        return torch.minimum((((2 * r + 1) * k + span) // (2 * span)).clamp(min=0), k)

    return ((up_to(rank) != up_to(rank - 1)) & present).view(values.shape)
