"""group_advantages, max_variance_select, select_rollouts: their checked arguments; groups_without_spread."""

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
    require_tensors,
    require_whole,
    whole_or_tensor,
)
from .._segments import spread
from .._segments.segments import segments_of
from .rules import ROLLOUT_RULES, ROLLOUTS, Number, usable

DTYPES_OF_REWARDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that the op takes
_HELD_BY = {
    **{dtype: dtype for dtype in DTYPES_OF_REWARDS},
    **dict.fromkeys((torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16), torch.float32),
    **dict.fromkeys((torch.int32, torch.uint32, torch.int64, torch.uint64), torch.float64),
}


class AdvantageArguments(NamedTuple):
    """The arguments of :func:`d3s_kernels.group_advantages`."""

    rewards: Tensor
    offsets: Tensor | None
    scale: str
    eps: float
    ddof: int


def as_numbers(rewards: Tensor) -> Tensor:
    """The rewards in a dtype that the op takes and that holds them."""
    if rewards.dtype not in _HELD_BY:
        raise ValueError(
            f"rewards: got dtype {rewards.dtype}; takes bool, integers, float16, bfloat16, float32 or float64"
        )
    return rewards.to(_HELD_BY[rewards.dtype])


def check_advantages(rewards: Tensor, offsets: Tensor | None, scale: str, eps: float, ddof: int) -> Tensor:
    """Checks these arguments and returns the rewards as the op takes them."""
    require_tensors(rewards=rewards)
    require_optional_tensors(rewards, offsets=offsets)
    require_whole(ddof=ddof)
    require_number(eps=eps)
    if not isinstance(scale, str):
        raise TypeError(f"scale: got {scale!r}; takes 'group', 'batch' or 'none'")
    return rewards if rewards.dtype in DTYPES_OF_REWARDS else as_numbers(rewards)


class RolloutArguments(NamedTuple):
    """The arguments of :func:`d3s_kernels.select_rollouts`, or of :func:`d3s_kernels.max_variance_select`."""

    op: str
    values: Tensor
    keep: int | Tensor
    rule: str
    offsets: Tensor | None
    scope: str
    mask: Tensor | None
    max_segment: int | None = None
    generator: torch.Generator | None = None
    equal_rows: bool = False

    def checked(self) -> tuple[RolloutArguments, Number]:
        """Checks the arguments and returns them with a bool mask, and ``keep`` as the ops take it."""
        name = "advantages" if self.op == "select_rollouts" else "values"
        require_tensors(**{name: self.values})
        require_readable(**{name: self.values, "keep": self.keep, "offsets": self.offsets, "mask": self.mask})
        number = checked_number(self.values, self.keep, self.offsets, self.max_segment)
        if self.op == "select_rollouts":
            check_rule(self.values, self.keep, self.rule, self.scope, self.generator, self.equal_rows)
        return self._replace(mask=checked_mask(self.mask, self.values)), number

    def select(self) -> Tensor:
        """The selection on one process."""
        number = (None, self.keep) if isinstance(self.keep, Tensor) else (self.keep, None)
        return ROLLOUTS[self.rule].select(
            self.values, number, self.mask, self.offsets, self.max_segment, self.scope == "batch", self.generator
        )


def checked_number(values: Tensor, keep: int | Tensor, offsets: Tensor | None, max_segment: int | None) -> Number:
    """Checks these arguments and returns ``keep`` as the ops take it."""
    require_optional_tensors(values, offsets=offsets)
    require_whole(max_segment=max_segment)
    return whole_or_tensor("keep", keep, values)


def check_rule(
    values: Tensor, keep: int | Tensor, rule: str, scope: str, generator: torch.Generator | None, equal_rows: bool
) -> None:
    """Checks these arguments; :func:`checked_number` has checked the types of ``values`` and ``keep``."""
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


def without_spread(rewards: Tensor, offsets: Tensor | None, tolerance: float | None) -> Tensor:
    """:func:`d3s_kernels.groups_without_spread`."""
    require_readable(rewards=rewards)
    require_tensors(rewards=rewards)
    require_optional_tensors(rewards, offsets=offsets)
    rewards = as_numbers(rewards)
    if tolerance is None:
        tolerance = spread.tolerance_of(rewards.dtype)
    require_number(tolerance=tolerance)
    if not tolerance >= 0:
        raise ValueError(f"tolerance: got {tolerance}; takes at least 0")
    # x - x is 0, or NaN if x is not finite. The op that marks those that are takes no float64.
    finite = usable((rewards - rewards).float(), None, offsets).flatten()
    segments = segments_of(rewards, offsets)
    same = segments.own(spread.without_spread(rewards.flatten().double(), finite, segments, tolerance))
    return same if offsets is not None else same.view(rewards.shape[:-1])
