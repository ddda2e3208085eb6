"""The arguments of the selections, for one process and for several ranks.

Each function here checks the arguments of a public function, and returns the ones that the op takes in another form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import (
    checked_mask,
    require_flag,
    require_generator,
    require_keep,
    require_number,
    require_optional_tensors,
    require_readable,
    require_rule,
    require_scope,
    require_segments,
    require_tensors,
    require_whole,
    temperature_argument,
)
from .._dispatch import ops
from .._segments.quota import QuotaOfOp, quota_of
from ..sampling import SamplingMask, op_arguments
from .rules import ROLLOUT_RULES, ROLLOUTS, TOKEN_RULES, TOKENS, token_factors

# ---- tokens ----------------------------------------------------------------------------------------------------------


def checked_scores(
    scores: Tensor,
    ratio: float | Tensor | None,
    k: int | Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
    drop_zeros: bool,
) -> tuple[QuotaOfOp, Tensor | None]:
    """Checks the arguments of :func:`d3s_kernels.topk_mask`. Returns how many scores are kept, and the mask."""
    require_tensors(scores=scores)
    require_segments(scores, offsets, max_segment)
    require_flag(drop_zeros=drop_zeros)
    return quota_of(scores, ratio, k), checked_mask(mask, scores)


Tokens = tuple[Tensor, Tensor, QuotaOfOp, Tensor | None]
"""Values and weights of this rank's tokens, how many tokens are kept, and the mask. A token's score is
``|weight| * value``. Weights are float32: one for all tokens, for each sequence, or for each token.
"""


class Logits(NamedTuple):
    """The logits from which the entropy of tokens is computed."""

    logits: Tensor
    temperature: float | Tensor
    sampling_mask: SamplingMask | None
    max_dense_rows: int | None

    @torch.no_grad()
    def entropy(self, mask: Tensor | None) -> Tensor:
        require_tensors(logits=self.logits)
        mask = checked_mask(mask, self.logits)
        number, tensor = temperature_argument(self.temperature, self.logits)
        spans = op_arguments(self.sampling_mask, self.max_dense_rows, self.logits)
        return ops.logprob_entropy(self.logits, None, number, tensor, mask, *spans)[1]


def checked_tokens(
    entropy: Tensor | Logits | None,
    advantages: Tensor | None,
    ratio: float | Tensor,
    rule: str,
    mask: Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
    scope: str,
    drop_zeros: bool,
    generator: torch.Generator | None,
    rank: int = 0,
) -> Tokens:
    """Checks the arguments of :func:`d3s_kernels.select_tokens`."""
    require_rule(rule, TOKEN_RULES)
    require_scope(scope, "sequence")
    if isinstance(entropy, Logits):
        entropy = entropy.entropy(mask)
    if TOKENS[rule].reads_advantages:
        require_tensors(entropy=entropy, advantages=advantages)
    else:
        require_tensors(entropy=entropy)
    assert entropy is not None
    require_segments(entropy, offsets, max_segment)
    require_flag(drop_zeros=drop_zeros)
    quota, mask = quota_of(entropy, ratio), checked_mask(mask, entropy)
    require_generator(generator, rule, TOKENS[rule].draws, entropy)
    values, weights = token_factors(rule, entropy, advantages, generator, rank)
    return values, weights_as_float32(weights), quota, mask


def weights_as_float32(advantages: Tensor) -> Tensor:
    dtype = advantages.dtype
    if dtype == torch.float32:
        return advantages
    if not dtype.is_floating_point:  # for floats, the dispatcher refuses tensors without plain memory
        require_readable(advantages=advantages)
    return advantages.float()


# ---- rollouts --------------------------------------------------------------------------------------------------------

DTYPES_OF_REWARDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that the op takes
_HELD_BY = {
    **{dtype: dtype for dtype in DTYPES_OF_REWARDS},
    **dict.fromkeys((torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16), torch.float32),
    **dict.fromkeys((torch.int32, torch.uint32, torch.int64, torch.uint64), torch.float64),
}


def rewards_as_floats(rewards: Tensor) -> Tensor:
    """Converts rewards to a dtype that the op takes and that can hold their values."""
    if rewards.dtype in DTYPES_OF_REWARDS:
        return rewards
    if rewards.dtype not in _HELD_BY:
        raise ValueError(
            f"rewards: got dtype {rewards.dtype}; takes bool, integers, float16, bfloat16, float32 or float64"
        )
    return rewards.to(_HELD_BY[rewards.dtype])


def checked_rewards(
    rewards: Tensor, offsets: Tensor | None, scale: str, eps: float, ddof: int
) -> tuple[Tensor, Tensor | None, str, float, int]:
    """Checks the arguments of :func:`d3s_kernels.group_advantages`."""
    require_tensors(rewards=rewards)
    if offsets is not None:
        require_optional_tensors(rewards, offsets=offsets)
    require_whole(ddof=ddof)
    require_number(eps=eps)
    if not isinstance(scale, str):
        raise TypeError(f"scale: got {scale!r}; takes 'group', 'batch' or 'none'")
    return rewards_as_floats(rewards), offsets, scale, eps, ddof


def checked_rollouts(
    values: Tensor,
    keep: int | Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
) -> tuple[QuotaOfOp, Tensor | None]:
    """Checks the arguments of :func:`d3s_kernels.max_variance_select`, or of ``select_rollouts``, where
    :func:`check_rule` checks the rest. Returns how many values are kept, and the mask. The caller checks the values
    before, since the two functions have different names for them.
    """
    require_segments(values, offsets, max_segment)
    if keep is None:
        raise TypeError("keep: got None; takes a whole number or a 0-d integer tensor")
    return quota_of(values, None, keep, "keep"), checked_mask(mask, values)


def check_rule(
    values: Tensor, keep: int | Tensor, rule: str, scope: str, generator: torch.Generator | None, equal_rows: bool
) -> None:
    """Checks the arguments that only ``select_rollouts`` has. :func:`checked_rollouts` has checked the types of the
    rest.
    """
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):  # the ops have other names for them
        raise ValueError(f"advantages: got dtype {values.dtype}; takes float32, bfloat16 or float16")
    require_rule(rule, ROLLOUT_RULES)
    require_generator(generator, rule, ROLLOUTS[rule].draws, values)
    require_scope(scope, "group")
    if rule != "max_variance":  # the op of max_variance checks it itself
        require_keep(keep)
    require_flag(equal_rows=equal_rows)
    if equal_rows and (rule, scope) != ("max_variance", "batch"):
        raise ValueError(
            f"equal_rows: got True with rule {rule!r} and scope {scope!r}; takes rule 'max_variance' and scope "
            "'batch'. d3s_kernels.distributed.plan_rows evens out what others keep"
        )
