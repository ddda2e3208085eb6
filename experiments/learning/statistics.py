"""What a run reached by a priced time, and how far arms are apart: differences paired by seed, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from .ledger import Counts
from .records import Run

CONFIDENCE = 0.95
Clock = Callable[[Counts], float]  # the time of what was done, at some prices


def reached(run: Run, clock: Clock, time: float, name: str = "first") -> float:
    """Pass@1, or another measure, at this time: between two evaluations on the line through them."""
    measured = [(clock(point.counts), getattr(point, name)) for point in run.points]
    times, values = zip(*((at, value) for at, value in measured if value is not None), strict=True)
    return float(np.interp(time, times, values))


def mean_until(run: Run, clock: Clock, time: float) -> float:
    """The mean of Pass@1 over time, which slow starts and collapses lower alike."""
    inside = [(clock(point.counts), point.first) for point in run.points if clock(point.counts) < time]
    inside.append((time, reached(run, clock, time)))
    area = sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(inside))
    return area / time


def time_to(run: Run, clock: Clock, level: float) -> float | None:
    """When Pass@1 first was this high, between two evaluations on the line through them; None if it never was."""
    before = run.points[0]
    for point in run.points:
        if point.first >= level:
            rise = point.first - before.first
            share = (level - before.first) / rise if rise > 0 else 1.0
            return clock(before.counts) + share * (clock(point.counts) - clock(before.counts))
        before = point
    return None


class Difference(NamedTuple):
    """The mean over seeds, and the half-width of its confidence interval (NaN with one seed)."""

    mean: float
    half_width: float

    @property
    def decided(self) -> bool:
        return abs(self.mean) > self.half_width

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half_width:.3f}" + " *" * self.decided


def paired(ours: Sequence[float], theirs: Sequence[float], comparisons: int) -> Difference:
    """The mean difference of values that belong to the same seeds.

    The interval is Student's, widened for the number of comparisons (Bonferroni), so that all of them hold together
    with a probability of ``CONFIDENCE``.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(differences) == 1:
        return Difference(differences[0], math.nan)
    quantile = student_quantile(len(differences) - 1, 1 - (1 - CONFIDENCE) / comparisons)
    return Difference(fmean(differences), quantile * stdev(differences) / math.sqrt(len(differences)))


@cache
def student_quantile(freedom: int, confidence: float) -> float:
    """The t for which a Student variable lies in [-t, t] with this probability, by numerical integration."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    t = np.linspace(0, 200, 2_000_001)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    inside = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) * (t[1] - t[0]))])  # of [-t, t]
    return float(np.interp(confidence, inside, t))
