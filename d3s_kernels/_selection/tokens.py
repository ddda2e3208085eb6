"""topk_mask, select_tokens, select_tokens_from_logits: their checked arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import (
    checked_mask,
    ratio_argument,
    require_flag,
    require_generator,
    require_optional_tensors,
    require_readable,
    require_rule,
    require_scope,
    require_tensors,
    require_whole,
    temperature_argument,
    whole_or_tensor,
)
from .._dispatch import ops
from ..sampling import SamplingMask, op_arguments
from .rules import TOKEN_RULES, TOKENS, token_factors

Selection = tuple[Tensor, Tensor, Tensor]
"""Mask, count, threshold."""
Ratio = tuple[float | None, Tensor | None]
"""A number and the tensor that replaces it, as the ops take them: one of the two is None."""
Factors = tuple[Tensor, Tensor, Ratio, Tensor | None]
"""The value and weight of each token, the ratio and the mask. No tuple of its own, which would take time."""


class TopkArguments(NamedTuple):
    """The arguments of :func:`d3s_kernels.topk_mask`."""

    scores: Tensor
    ratio: float | Tensor | None
    k: int | Tensor | None
    mask: Tensor | None
    offsets: Tensor | None
    max_segment: int | None
    drop_zeros: bool


def checked_ratio(
    like: Tensor,
    ratio: float | Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
    drop_zeros: bool,
) -> Ratio:
    """Checks what all selections of tokens take, and returns the ratio. ``like`` has the device of all tensors."""
    require_optional_tensors(like, offsets=offsets)
    require_whole(max_segment=max_segment)
    require_flag(drop_zeros=drop_zeros)
    return ratio_argument(ratio, like)


def checked_quota(
    scores: Tensor,
    ratio: float | Tensor | None,
    k: int | Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
    drop_zeros: bool,
) -> tuple[float | None, Tensor | None, int | None, Tensor | None]:
    """Checks the arguments and returns how many are kept: :class:`~d3s_kernels._segments.quota.Quota`'s four fields."""
    require_tensors(scores=scores)
    number, tensor = checked_ratio(scores, ratio, offsets, max_segment, drop_zeros)
    whole, whole_tensor = (None, None) if k is None else whole_or_tensor("k", k, scores)
    return number, tensor, whole, whole_tensor


class TokenArguments(NamedTuple):
    """The arguments of :func:`d3s_kernels.select_tokens`, or with logits of ``select_tokens_from_logits``."""

    entropy: Tensor | None
    advantages: Tensor | None
    ratio: float | Tensor
    rule: str
    mask: Tensor | None
    offsets: Tensor | None
    max_segment: int | None
    scope: str
    drop_zeros: bool
    generator: torch.Generator | None = None
    logits: Tensor | None = None
    temperature: float | Tensor = 1.0
    sampling_mask: SamplingMask | None = None
    max_dense_rows: int | None = None

    def checked_factors(self, rank: int = 0) -> Factors:
        """Checks the arguments and returns the value and weight of each token on this rank, the ratio and the mask.

        A token's score is ``|weight| * value``. Weights are float32: one for all, for each sequence, or for each token.
        """
        rule, generator = self.rule, self.generator
        require_rule(rule, TOKEN_RULES)
        require_scope(self.scope, "sequence")
        entropy = self.entropy if self.logits is None else self._entropy_of_logits(self.logits)
        if TOKENS[rule].reads_advantages:
            require_tensors(entropy=entropy, advantages=self.advantages)
        else:
            require_tensors(entropy=entropy)
        assert entropy is not None
        number = checked_ratio(entropy, self.ratio, self.offsets, self.max_segment, self.drop_zeros)
        mask = checked_mask(self.mask, entropy)
        require_generator(generator, rule, TOKENS[rule].draws, entropy)
        values, weights = token_factors(rule, entropy, self.advantages, generator, rank)
        return values, as_float32(weights), number, mask

    def of_op(
        self, values: Tensor, weights: Tensor, ratio: Ratio, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, float | None, Tensor | None, Tensor | None, Tensor | None, int | None, bool, bool]:
        """The arguments of the op ``select_tokens``."""
        pooled = self.scope == "batch"
        return values, weights, *ratio, mask, self.offsets, self.max_segment, pooled, self.drop_zeros

    @torch.no_grad()
    def _entropy_of_logits(self, logits: Tensor) -> Tensor:
        require_tensors(logits=logits)
        mask = checked_mask(self.mask, logits)
        number, tensor = temperature_argument(self.temperature, logits)
        spans = op_arguments(self.sampling_mask, self.max_dense_rows, logits)
        return ops.logprob_entropy(logits, None, number, tensor, mask, *spans)[1]


def as_float32(advantages: Tensor) -> Tensor:
    dtype = advantages.dtype
    if dtype == torch.float32:
        return advantages
    if not dtype.is_floating_point:  # else the dispatcher finds what has no plain memory
        require_readable(advantages=advantages)
    return advantages.float()
