"""Kinds of targets, and how each is judged: by the median over rounds of values measured in the same round.

The median has an interval. A target is met, or missed, if it is so at both ends of the interval; else it is undecided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import ClassVar

from .clock import ONE_CALL
from .harness import OURS
from .quiet import OFF
from .timing import Contenders

CONFIDENCE = 0.95
Interval = tuple[float, float]
MET, MISSED, UNDECIDED, REPORTED = "met", "missed", "undecided", "reported"


def interval(values: list[float]) -> Interval | None:
    """Two of the values, with the median between them in at least 95 % of cases, for any distribution.

    The median is below the r-th smallest value only if fewer than r values are below the median, each with probability
    1/2. The same holds above. Of fewer than six values not even the outermost suffice: then there is no interval.
    """
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while (outside := outside + 2 * comb(count, rank) / 2**count) <= 1 - CONFIDENCE:
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def of_ratios(contenders: Contenders, above: str, below: str) -> tuple[float, Interval | None]:
    """The median of the rounds' ratios, and its interval.

    Where a contender was timed once, the rounds say nothing of this time. It is taken to be off by as much as the
    machine may be, and the interval is so much wider.
    """
    ratios = contenders[above].over(contenders[below])
    ends = interval(ratios)
    if ends and ONE_CALL in (contenders[above].timed_by, contenders[below].timed_by):
        ends = ends[0] * (1 - OFF), ends[1] / (1 - OFF)
    return median(ratios), ends


@dataclass(frozen=True)
class Verdict:
    value: float
    interval: Interval | None
    against: str  # the contender that ours was compared with; empty if none
    outcome: str


def verdict(value: float, ends: Interval | None, against: str, holds: Callable[[float], bool] | None) -> Verdict:
    """`holds` says whether a value meets the bound; None without a bound."""
    if holds is None:
        return Verdict(value, ends, against, REPORTED)
    held = {holds(end) for end in ends} if ends else {True, False}
    outcome = UNDECIDED if len(held) == 2 else MET if held == {True} else MISSED
    return Verdict(value, ends, against, outcome)


@dataclass(frozen=True)
class Faster:
    """Ours takes at most 1 / `times` of what the fastest of `than` takes."""

    contest: str
    than: tuple[str, ...]
    times: float | None = None
    unit: ClassVar[str] = "x as fast"

    @property
    def bound(self) -> str:
        return f">= {self.times:g}x as fast" if self.times else ""

    def judge(self, contenders: Contenders) -> Verdict | None:
        present = [name for name in self.than if name in contenders]
        if not present:
            return None
        rival = min(present, key=lambda name: contenders[name].median)
        holds = (lambda value: value >= self.times) if self.times else None
        return verdict(*of_ratios(contenders, rival, OURS), rival, holds)


@dataclass(frozen=True)
class Within:
    """Ours takes at most `times` of what `of` takes."""

    contest: str
    of: str
    times: float | None = None
    unit: ClassVar[str] = "x the time"

    @property
    def bound(self) -> str:
        return f"<= {self.times:g}x the time" if self.times else ""

    def judge(self, contenders: Contenders) -> Verdict | None:
        if self.of not in contenders:
            return None
        holds = (lambda value: value <= self.times) if self.times else None
        return verdict(*of_ratios(contenders, OURS, self.of), self.of, holds)


@dataclass(frozen=True)
class Under:
    """One call of ours takes at most this many microseconds."""

    contest: str
    microseconds: float
    unit: ClassVar[str] = " us"

    @property
    def bound(self) -> str:
        return f"<= {self.microseconds:g} us"

    def judge(self, contenders: Contenders) -> Verdict | None:
        values = [1e6 * seconds for seconds in contenders[OURS].seconds]
        return verdict(median(values), interval(values), "", lambda value: value <= self.microseconds)


@dataclass(frozen=True)
class ShareOf:
    """Ours reaches at least this percentage of the bandwidth of `of`, which moves the same bytes."""

    contest: str
    of: str
    percent: float
    unit: ClassVar[str] = "% of the bandwidth"

    @property
    def bound(self) -> str:
        return f">= {self.percent:g}%"

    def judge(self, contenders: Contenders) -> Verdict | None:
        if self.of not in contenders:
            return None
        share, ends = of_ratios(contenders, self.of, OURS)
        ends = ends and (100 * ends[0], 100 * ends[1])
        return verdict(100 * share, ends, self.of, lambda value: value >= self.percent)


Target = Faster | Within | Under | ShareOf
