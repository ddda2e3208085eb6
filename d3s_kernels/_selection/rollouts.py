"""group_advantages, max_variance_select, select_rollouts: their checked arguments; groups_without_spread."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import (
    require_flag,
    require_generator,
    require_keep,
    require_number,
    require_optional_tensors,
    require_rule,
    require_scope,
    require_tensors,
    require_whole,
    whole_or_tensor,
)
from .._segments.segments import segments_of
from .rules import ROLLOUT_RULES, ROLLOUTS, Number, usable

_EIGHT_STEPS = 1e-6  # of float32


class AdvantageArguments(NamedTuple):
    """The arguments of :func:`d3s_kernels.group_advantages`."""

    rewards: Tensor
    offsets: Tensor | None
    scale: str
    eps: float
    ddof: int


def check_advantages(rewards: Tensor, offsets: Tensor | None, scale: str, eps: float, ddof: int) -> None:
    require_tensors(rewards=rewards)
    require_optional_tensors(rewards, offsets=offsets)
    require_whole(ddof=ddof)
    require_number(eps=eps)
    if not isinstance(scale, str):
        raise TypeError(f"scale: got {scale!r}; takes 'group', 'batch' or 'none'")


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

    def checked_number(self) -> Number:
        """Checks the arguments and returns ``keep`` as the ops take it."""
        require_tensors(**{"advantages" if self.op == "select_rollouts" else "values": self.values})
        number = checked_number(self.values, self.keep, self.offsets, self.mask, self.max_segment)
        if self.op == "select_rollouts":
            check_rule(self.values, self.keep, self.rule, self.scope, self.generator, self.equal_rows)
        return number

    def select(self) -> Tensor:
        """The selection on one process."""
        number = (None, self.keep) if isinstance(self.keep, Tensor) else (self.keep, None)
        return ROLLOUTS[self.rule].select(
            self.values, number, self.mask, self.offsets, self.max_segment, self.scope == "batch", self.generator
        )


def checked_number(
    values: Tensor, keep: int | Tensor, offsets: Tensor | None, mask: Tensor | None, max_segment: int | None
) -> Number:
    """Checks these arguments and returns ``keep`` as the ops take it."""
    require_optional_tensors(values, offsets=offsets, mask=mask)
    require_whole(max_segment=max_segment)
    return whole_or_tensor("keep", keep, values)


def check_rule(
    values: Tensor, keep: int | Tensor, rule: str, scope: str, generator: torch.Generator | None, equal_rows: bool
) -> None:
    """Checks these arguments; :func:`checked_number` has checked the types of ``values`` and ``keep``."""
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
    if tolerance is None:
        tolerance = max(_EIGHT_STEPS, torch.finfo(rewards.dtype).eps)
    require_number(tolerance=tolerance)
    if not tolerance >= 0:
        raise ValueError(f"tolerance: got {tolerance}; takes at least 0")
    present, segments = usable(rewards, None, offsets).flatten(), segments_of(rewards, offsets)
    values = rewards.flatten().float()

    def most(of: Tensor, absent: float) -> Tensor:
        """The largest of each segment."""
        start = values.new_full((segments.edges.shape[0] - 1,), absent)
        return segments.own(start.scatter_reduce(0, segments.of, of.masked_fill(~present, absent), "amax"))

    highest, lowest, size = most(values, -math.inf), -most(-values, -math.inf), most(values.abs(), 0)
    same: Tensor = ~(highest - lowest > tolerance * size.clamp(min=1))
    return same if offsets is not None else same.view(rewards.shape[:-1])
