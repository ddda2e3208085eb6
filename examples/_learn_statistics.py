"""Differences between arms, paired by seed, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, stdev

import numpy as np
from _learn_setting import Run

CONFIDENCE = 0.95


class Measure(Enum):
    """The measures by which runs are compared."""

    END = "at the end"
    THROUGHOUT = "mean over the run"
    AT_EQUAL_TIME = "at equal time"
    AT_EQUAL_TOKENS = "at equal tokens"


@dataclass(frozen=True)
class Difference:
    """Mean over seeds, and the half-width of its confidence interval (None with a single seed)."""

    mean: float
    half_width: float | None

    @property
    def verdict(self) -> str:
        if self.half_width is None:
            return "one seed"
        if abs(self.mean) <= self.half_width:
            return "undecided"
        return "better" if self.mean > 0 else "worse"


def measures(run: Run, time: float = math.inf, tokens: float = math.inf) -> dict[Measure, float]:
    """The measures of a run. `time` (seconds of training) and `tokens` (with a gradient) are the points at which arms
    are compared at equal time and at equal tokens.
    """
    steps, rewards, trained_on, seconds = (
        [getattr(point, name) for point in run.points] for name in ("step", "reward", "tokens", "total")
    )
    area = sum((b - a) * (x + y) / 2 for a, b, x, y in zip(steps, steps[1:], rewards, rewards[1:], strict=False))
    return {
        Measure.END: rewards[-1],
        Measure.THROUGHOUT: area / (steps[-1] - steps[0]),
        Measure.AT_EQUAL_TIME: float(np.interp(time, seconds, rewards)),
        Measure.AT_EQUAL_TOKENS: float(np.interp(tokens, trained_on, rewards)),
    }


def seconds_to(run: Run, reward: float) -> float | None:
    """Seconds of training until the reward first was this high, between two evaluations if need be; None if it never
    was in this run.
    """
    before = run.points[0]
    for point in run.points:
        if point.reward >= reward:
            rise = point.reward - before.reward
            share = (reward - before.reward) / rise if rise > 0 else 1.0
            return before.total + share * (point.total - before.total)
        before = point
    return None


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The mean difference of paired values: entry i of both lists is from the same seed."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(differences) == 1:
        return Difference(differences[0], None)
    freedom = len(differences) - 1
    return Difference(fmean(differences), student_quantile(freedom) * stdev(differences) / math.sqrt(len(differences)))


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t for which a Student variable lies in [-t, t] with this probability, by numerical integration."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    t = np.linspace(0, 50, 500_001)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    inside = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) * (t[1] - t[0]))])  # of [-t, t]
    return float(np.interp(confidence, inside, t))
