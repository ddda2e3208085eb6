"""D3S's down-sampling schedule: training starts with few rollouts and tokens, and uses more and more of them."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple


class Budget(NamedTuple):
    """The budget of a training step: how many rollouts of each group it trains on, and on which share of these
    rollouts' tokens.
    """

    rollouts: int
    token_ratio: float


def progress_of(step: int, total_steps: int) -> float:
    """Returns the share of training that is done when a step begins: 0 in the first step, and 1 in the last step, so
    that the last step has the schedule's end. All our trainers use this.

    Args:
        step: the number of steps before this one. From ``total_steps`` on, training is done.
        total_steps: the number of steps of the run. If it is 1, or below 1 because it is not known yet, the result is
            0.

    Example:
        >>> import d3s_kernels as d3s
        >>> [d3s.progress_of(step, 5) for step in range(5)]
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    return min(step / (total_steps - 1), 1.0) if total_steps > 1 else 0.0


class DownSamplingSchedule:
    """A function from the progress of training to the budget, which changes from ``start`` to ``end``.

    ``linear`` is the paper's shape (arXiv 2509.22115): ``(1 - p) start + p end`` at progress p. The defaults of
    ``start`` and ``end`` are from the paper. ``cosine`` changes slowly at the start and at the end; ``exponential``
    grows by equal factors over equal steps of p. The number of rollouts is rounded to the nearest integer, half up.

    Args:
        start: the budget at progress 0; rollouts at least 1, token_ratio in (0, 1].
        end: the budget at progress 1, with the same limits.
        shape: "linear", "cosine" or "exponential".

    Raises:
        ValueError, TypeError: a wrong budget or shape; in a call of the schedule, a progress outside [0, 1].

    Example:
        >>> import d3s_kernels as d3s
        >>> schedule = d3s.DownSamplingSchedule()
        >>> schedule(0.0), schedule(0.5)
        (Budget(rollouts=8, token_ratio=0.05), Budget(rollouts=20, token_ratio=0.125))
    """

    def __init__(
        self,
        start: Budget = Budget(8, 0.05),  # noqa: B008  an immutable tuple
        end: Budget = Budget(32, 0.20),  # noqa: B008
        shape: Literal["linear", "cosine", "exponential"] = "linear",
    ) -> None:
        for name, budget in (("start", start), ("end", end)):
            if not isinstance(budget, tuple) or len(budget) != 2:
                raise TypeError(f"{name}: got {budget!r}; takes a Budget(rollouts, token_ratio)")
            budget = Budget(*budget)
            if not budget.rollouts >= 1:
                raise ValueError(f"{name}: got {budget.rollouts} rollouts; takes at least 1")
            if not 0 < budget.token_ratio <= 1:
                raise ValueError(f"{name}: got a token_ratio of {budget.token_ratio}; takes a number in (0, 1]")
        if shape not in ("linear", "cosine", "exponential"):
            raise ValueError(f"shape: got {shape!r}; takes one of 'linear', 'cosine', 'exponential'")
        self.start, self.end, self.shape = Budget(*start), Budget(*end), shape

    def __call__(self, progress: float) -> Budget:
        """Returns the budget at ``progress``, the share of training that is done."""
        if not 0 <= progress <= 1:
            raise ValueError(f"progress: got {progress}; takes a number in [0, 1]")
        rollouts, token_ratio = (
            _between(start, end, progress, self.shape) for start, end in zip(self.start, self.end, strict=True)
        )
        return Budget(math.floor(rollouts + 0.5), token_ratio)

    def __repr__(self) -> str:
        return f"DownSamplingSchedule(start={self.start}, end={self.end}, shape={self.shape!r})"


def _between(start: float, end: float, progress: float, shape: str) -> float:
    if progress == 1:
        return end  # exactly, without rounding
    if shape == "exponential":
        return start * math.pow(end / start, progress)
    if shape == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return start + (end - start) * progress
