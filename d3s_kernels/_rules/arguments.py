"""The arguments of the selections, for one process and for several ranks.

For each selection, one function checks the types and devices of the public function's arguments, and returns the
arguments of the op in the order of its schema (``csrc/ops``). The op itself checks shapes and values: for
instance, it refuses a ratio of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import SegmentFields
from .._arguments.checks import (
    checked_mask,
    in_a_graph,
    integers_as_float32,
    is_known,
    is_number,
    no_tensor,
    require_flag,
    require_number,
    require_optional_tensors,
    require_readable,
    require_rule,
    require_scope,
    require_segments,
    require_tensors,
    require_whole,
    whole_number,
)
from .rules import ROLLOUT_RULES, ROLLOUTS, TOKEN_RULES, TOKENS, token_factors


def _ratio_argument(ratio: float | Tensor | None, like: Tensor) -> tuple[float | None, Tensor | None]:
    """Returns the op's two arguments for a ratio: a number, and a 0-d tensor. One of the two has the ratio, and the
    other is None. If ``ratio`` is None, both are None. A tensor must be on the device of ``like``.
    """
    if ratio is None:
        return None, None
    if type(ratio) is not float:  # the usual case
        if isinstance(ratio, Tensor):
            require_optional_tensors(like, ratio=ratio)
            return None, ratio
        if not is_number(ratio):
            raise no_tensor("ratio", ratio, "a number or a 0-d tensor")
    if torch.compiler.is_compiling():
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: got {ratio}; takes a number in (0, 1]")
        return None, in_a_graph(ratio, like)
    return ratio, None


def _whole_argument(name: str, number: int | Tensor | None, like: Tensor) -> tuple[int | None, Tensor | None]:
    """Like :func:`_ratio_argument`, but for the argument ``name``, which is the number of values to keep."""
    if number is None or type(number) is int:  # the fastest tests first
        return number, None
    if isinstance(number, Tensor):
        require_optional_tensors(like, **{name: number})
        return None, number
    require_whole(**{name: number})
    return number, None


def require_generator(generator: torch.Generator | None, rule: str, draws: bool, like: Tensor) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}; takes a torch.Generator or None")
    if not draws:
        raise ValueError(f"generator: got one with rule {rule!r}; takes one only with rule 'random'")
    if generator.device.type != like.device.type:
        raise ValueError(f"generator: is of {generator.device}; takes one of the values' device, {like.device}")


# ---- tokens ----------------------------------------------------------------------------------------------------------


def topk_mask_arguments(
    scores: Tensor,
    ratio: float | Tensor | None,
    k: int | Tensor | None,
    mask: Tensor | None,
    segments: SegmentFields,
    drop_zeros: bool,
) -> tuple[Any, ...]:
    require_tensors(scores=scores)
    require_segments(scores, segments)
    require_flag("drop_zeros", drop_zeros)
    number, tensor = _ratio_argument(ratio, scores)
    k, k_tensor = _whole_argument("k", k, scores)
    mask = checked_mask(mask, scores)
    return scores, number, tensor, k, k_tensor, mask, *segments, drop_zeros


def select_tokens_arguments(
    entropy: Tensor,
    advantages: Tensor | None,
    ratio: float | Tensor,
    rule: str,
    mask: Tensor | None,
    segments: SegmentFields,
    drop_zeros: bool,
    generator: torch.Generator | None,
    rank: int = 0,
) -> tuple[Any, ...]:
    """Returns the arguments of the op ``select_tokens``. Entropies and advantages are replaced by the rule's values and
    weights. With the rule "advantage_entropy", ``entropy`` may also be logits.
    """
    require_rule(rule, TOKEN_RULES)
    scoring = TOKENS[rule]
    if scoring.reads_advantages:
        require_tensors(entropy=entropy, advantages=advantages)
    else:
        require_tensors(entropy=entropy)
    require_segments(entropy, segments)
    require_flag("drop_zeros", drop_zeros)
    if drop_zeros and scoring.draws:
        raise ValueError(f"drop_zeros: got True with rule {rule!r}; takes False: scores are random numbers, never 0")
    number, tensor = _ratio_argument(ratio, entropy)
    mask = checked_mask(mask, entropy)
    if generator is not None:
        require_generator(generator, rule, scoring.draws, entropy)
    values, weights = token_factors(rule, entropy, advantages, generator, rank)
    if weights.dtype != torch.float32:
        if not weights.dtype.is_floating_point:  # the dispatcher refuses unreadable float tensors
            require_readable(advantages=weights)
        weights = weights.float()
    return values, weights, number, tensor, mask, *segments, drop_zeros


# ---- rollouts --------------------------------------------------------------------------------------------------------

DTYPES_OF_REWARDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the dtypes that the op takes
_HELD_BY = {
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


def group_advantages_arguments(
    rewards: Tensor, offsets: Tensor | None, scale: str, eps: float, ddof: int
) -> tuple[Any, ...]:
    require_tensors(rewards=rewards)
    if offsets is not None:
        require_optional_tensors(rewards, offsets=offsets)
    if type(ddof) is not int:  # whole_number checks an abstract class, which takes longer than all other checks here
        whole_number("ddof", ddof)
    require_number(eps=eps)
    if not isinstance(scale, str):
        raise TypeError(f"scale: got {scale!r}; takes 'group', 'batch' or 'none'")
    return rewards_as_floats(rewards), offsets, scale, eps, ddof


def max_variance_arguments(
    values: Tensor,
    keep: int | Tensor,
    mask: Tensor | None,
    segments: SegmentFields,
) -> tuple[Any, ...]:
    """Returns the arguments of the op ``max_variance_select``. The caller must check the type of ``values``."""
    require_segments(values, segments)
    if keep is None:
        raise TypeError("keep: got None; takes a whole number or a 0-d integer tensor")
    number, tensor = _whole_argument("keep", keep, values)
    return integers_as_float32("values", values), number, tensor, checked_mask(mask, values), *segments


def select_rollouts_arguments(
    advantages: Tensor,
    keep: int | Tensor,
    rule: str,
    scope: str,
    mask: Tensor | None,
    offsets: Tensor | None,
    generator: torch.Generator | None,
    equal_rows: bool,
) -> tuple[Any, ...]:
    """Returns the arguments of the op ``max_variance_select``. They are enough for every rule of
    :func:`.rules.marked_by_rule`.
    """
    require_tensors(advantages=advantages)
    advantages = integers_as_float32("advantages", advantages)
    if advantages.dtype not in (torch.float32, torch.bfloat16, torch.float16):  # the op's error would say `values`
        raise ValueError(f"advantages: got dtype {advantages.dtype}; takes float32, bfloat16, float16 or integers")
    require_rule(rule, ROLLOUT_RULES)
    require_generator(generator, rule, ROLLOUTS[rule].draws, advantages)
    segments = offsets, None, require_scope(scope, "group")
    require_flag("equal_rows", equal_rows)
    if equal_rows and (rule, scope) != ("max_variance", "batch"):
        raise ValueError(
            f"equal_rows: got True with rule {rule!r} and scope {scope!r}; takes rule 'max_variance' and scope "
            "'batch'. d3s_kernels.distributed.plan_rows evens out what others keep"
        )
    arguments = max_variance_arguments(advantages, keep, mask, segments)
    if rule != "max_variance":  # with the rule max_variance, the op itself checks ``keep``
        _require_keep(keep)
    return arguments


def _require_keep(keep: int | Tensor) -> None:
    """Refuses a ``keep`` below 1. The value of a tensor is checked only if the host may read it (:func:`is_known`)."""
    if isinstance(keep, Tensor):
        if keep.numel() != 1 or keep.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"keep: got shape {list(keep.shape)} of {keep.dtype}; takes a number or a 0-d int64 or int32 tensor"
            )
        if torch.compiler.is_compiling() or not is_known(keep):
            return
        keep = int(keep)
    if keep < 1:
        raise ValueError(f"keep: got {keep}; takes at least 1")
