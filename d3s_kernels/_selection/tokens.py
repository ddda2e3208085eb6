"""topk_mask, select_tokens, select_tokens_from_logits: arguments, and the selection on one process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import (
    ratio_argument,
    require_flag,
    require_generator,
    require_optional_tensors,
    require_rule,
    require_scope,
    require_tensors,
    require_whole,
    temperature_argument,
    whole_or_tensor,
)
from .._dispatch import ops
from .._segments.quota import Quota
from .rules import TOKEN_RULES, TOKENS, token_factors

Selection = tuple[Tensor, Tensor, Tensor]
"""Mask, count, threshold."""


class TopkArguments(NamedTuple):
    """Those of :func:`d3s_kernels.topk_mask`."""

    scores: Tensor
    ratio: float | Tensor | None
    k: int | Tensor | None
    mask: Tensor | None
    offsets: Tensor | None
    max_segment: int | None
    drop_zeros: bool

    def checked(self) -> Quota:
        require_tensors(scores=self.scores)
        require_optional_tensors(self.scores, mask=self.mask, offsets=self.offsets)
        require_whole(max_segment=self.max_segment)
        require_flag(drop_zeros=self.drop_zeros)
        share = ratio_argument(self.ratio, self.scores)
        return Quota(*share, *((None, None) if self.k is None else whole_or_tensor("k", self.k, self.scores)))

    def select(self, quota: Quota) -> Tensor:
        mask: Tensor = ops.topk_mask(self.scores, *quota, self.mask, self.offsets, self.max_segment, self.drop_zeros)
        return mask


class Factors(NamedTuple):
    """A token's score is ``|weight| * value``."""

    values: Tensor
    weights: Tensor  # float32: one for all, for each sequence, or for each token
    quota: Quota


class TokenArguments(NamedTuple):
    """Those of :func:`d3s_kernels.select_tokens`; with logits, of :func:`d3s_kernels.select_tokens_from_logits`."""

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

    def factors(self, rank: int = 0) -> Factors:
        """Of the arguments, once they are checked; on this rank."""
        rule = TOKENS.get(self.rule)
        require_rule(self.rule, TOKEN_RULES)
        assert rule is not None
        require_scope(self.scope, "sequence")
        entropy = self.entropy if self.logits is None else self._entropy_of_logits(self.logits)
        require_tensors(entropy=entropy)
        assert entropy is not None
        if rule.reads_advantages:
            require_tensors(entropy=entropy, advantages=self.advantages)
        require_optional_tensors(entropy, mask=self.mask, offsets=self.offsets)
        require_whole(max_segment=self.max_segment)
        require_flag(drop_zeros=self.drop_zeros)
        require_generator(self.generator, self.rule, rule.draws, entropy)
        share = ratio_argument(self.ratio, entropy)
        values, weights = token_factors(self.rule, entropy, self.advantages, self.generator, rank)
        return Factors(values, as_float32(weights), Quota(*share))

    def select(self, factors: Factors) -> Selection:
        found: Selection = ops.select_tokens(*self.of_op(factors))
        return found

    def of_op(self, factors: Factors) -> tuple[object, ...]:
        """What the op ``select_tokens`` is called with."""
        values, weights, quota = factors
        pooled = self.scope == "batch"
        return (
            values, weights, quota.ratio, quota.ratio_tensor, self.mask, self.offsets, self.max_segment, pooled,
            self.drop_zeros,
        )  # fmt: skip

    @torch.no_grad()
    def _entropy_of_logits(self, logits: Tensor) -> Tensor:
        require_tensors(logits=logits)
        require_optional_tensors(logits, mask=self.mask)
        temperature = temperature_argument(self.temperature, logits, logits.shape[:-1])
        entropy: Tensor = ops.logprob_entropy(logits, None, *temperature, self.mask)[1]
        return entropy


def as_float32(advantages: Tensor) -> Tensor:
    return advantages if advantages.dtype == torch.float32 else advantages.float()
