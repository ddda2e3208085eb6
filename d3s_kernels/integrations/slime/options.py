"""The options of the hooks: entries ``d3s_...`` of the file of ``--custom-config-path``, which become attributes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, Literal

from ...schedule import Budget
from .._hook_options import HookOptions
from .._options import schedule_of

_PREFIX = "d3s_"


@dataclasses.dataclass(frozen=True)
class D3SOptions(HookOptions):
    """The options, without their prefix ``d3s_``; ``docs/trainers.md`` says what each means.

    Raises:
        ValueError: from :meth:`from_args`, for a bad value or an unknown option; the message names it, what was given
            and what it takes.

    Example:
        >>> from argparse import Namespace
        >>> from d3s_kernels.integrations.slime import D3SOptions
        >>> options = D3SOptions.from_args(Namespace(d3s_rollouts=0.25, d3s_token_ratio_start=0.1))
        >>> options.budget(progress=0.0, group_size=16), options.budget(progress=1.0, group_size=16)
        (Budget(rollouts=4, token_ratio=0.1), Budget(rollouts=4, token_ratio=0.2))
    """

    token_ratio_start: float = 0.2
    token_ratio_end: float = 0.2
    schedule_shape: Literal["linear", "cosine", "exponential"] = "linear"

    @classmethod
    def from_args(cls, args: Any) -> D3SOptions:
        """The options among a trainer's arguments; missing ones have their defaults."""
        given = {name: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
        return cls.from_values({name.removeprefix(_PREFIX): value for name, value in given.items()}, _PREFIX)

    @property
    def follows_schedule(self) -> bool:
        """Whether the share of tokens changes while training goes on."""
        return self.token_ratio_start != self.token_ratio_end

    def budget(self, progress: float, group_size: int) -> Budget:
        """The budget of a step. The rollouts are constant, because a step takes a fixed number of them."""
        ends = {"rollouts_start": self.rollouts, "rollouts_end": self.rollouts}
        return schedule_of(SimpleNamespace(**dataclasses.asdict(self), **ends), group_size)(progress)
