"""group_advantages, max_variance_select, select_rollouts: arguments, and the result on one process."""

from __future__ import annotations

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
from .._dispatch import ops
from .rules import ROLLOUT_RULES, ROLLOUTS, percentile

_ALL = 2**62  # more than any segment has


class AdvantageArguments(NamedTuple):
    """Those of :func:`d3s_kernels.group_advantages`."""

    rewards: Tensor
    offsets: Tensor | None
    scale: str
    eps: float
    ddof: int

    def check(self) -> None:
        require_tensors(rewards=self.rewards)
        require_optional_tensors(self.rewards, offsets=self.offsets)
        require_whole(ddof=self.ddof)
        require_number(eps=self.eps)
        if not isinstance(self.scale, str):
            raise TypeError(f"scale: got {self.scale!r}; takes 'group', 'batch' or 'none'")

    def compute(self) -> Tensor:
        advantages: Tensor = ops.group_advantages(*self)
        return advantages


class RolloutArguments(NamedTuple):
    """Those of :func:`d3s_kernels.select_rollouts`, or of :func:`d3s_kernels.max_variance_select`."""

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

    def check(self) -> None:
        values = self.values
        require_tensors(**{"advantages" if self.op == "select_rollouts" else "values": values})
        require_optional_tensors(values, offsets=self.offsets, mask=self.mask)
        whole_or_tensor("keep", self.keep, values)
        require_whole(max_segment=self.max_segment)
        if self.op == "select_rollouts":
            self._check_rule()

    def _check_rule(self) -> None:
        require_rule(self.rule, ROLLOUT_RULES)
        require_generator(self.generator, self.rule, ROLLOUTS[self.rule].draws, self.values)
        require_scope(self.scope, "group")
        if self.rule != "max_variance":  # whose op checks it
            require_keep(self.keep)
        require_flag(equal_rows=self.equal_rows)
        if self.equal_rows and (self.rule, self.scope) != ("max_variance", "batch"):
            raise ValueError(
                f"equal_rows: got True with rule {self.rule!r} and scope {self.scope!r}; takes rule 'max_variance' and "
                "scope 'batch'. d3s_kernels.distributed.plan_rows evens out what others keep"
            )

    @property
    def number(self) -> tuple[int | None, Tensor | None]:
        """``keep`` as the ops take it: a number, or the tensor in its place."""
        return (None, self.keep) if isinstance(self.keep, Tensor) else (self.keep, None)

    def select(self) -> Tensor:
        values, offsets, pooled = self.values, self.offsets, self.scope == "batch"
        if self.rule == "max_variance":
            most_varied: Tensor = ops.max_variance_select(
                values, *self.number, self.mask, offsets, self.max_segment, pooled
            )
            return most_varied
        # Max variance keeps every usable value where there are no more than `keep`, and refuses bad arguments.
        usable = ops.max_variance_select(values, _ALL, None, self.mask, offsets, None, False)
        if self.rule == "percentile":
            return percentile(values, self.keep, usable, offsets, pooled)
        score = ROLLOUTS[self.rule].score
        assert score is not None, self.rule
        scores = score(values, self.generator)
        highest: Tensor = ops.topk_mask(scores, None, None, *self.number, usable, offsets, None, False, pooled)
        return highest
