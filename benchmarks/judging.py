"""The kinds of targets, and the rules that judge them: one rule for CPUs, and one rule for GPUs.

A CPU is shared, and other programs disturb most rounds. The fastest of many rounds shows the time of undisturbed work,
so the ratio of the fastest rounds decides. A GPU is not shared, so the median of the rounds' ratios decides. Each of
these two ratios has a range. A target is met if both ends of the range meet it, missed if neither end does, and
otherwise undecided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from math import comb
from statistics import median
from typing import ClassVar, NamedTuple

from .clock import FEW_CALLS
from .harness import OURS
from .quiet import OFF
from .timing import Contenders, Timing, at_another_clock

CONFIDENCE = 0.95
PARTS, OF_A_PART = 3, 3  # the number of parts of the rounds, and the fewest rounds of a part
Interval = tuple[float, float]
MET, MISSED, UNDECIDED, REPORTED = "met", "missed", "undecided", "reported"


class Ratio(NamedTuple):
    value: float
    interval: Interval | None
    median: float  # of the rounds' ratios, under either rule

    def times(self, factor: float) -> "Ratio":
        ends = self.interval and (factor * self.interval[0], factor * self.interval[1])
        return Ratio(factor * self.value, ends, factor * self.median)


@dataclass(frozen=True)
class Rule:
    name: str
    time: str  # which of a contender's times decides: `fastest` or `median`
    ends: Callable[[list[float], list[float]], Interval | None]

    def of(self, timing: Timing) -> float:
        return getattr(timing, self.time)

    def ratio(self, above: list[float], below: list[float]) -> Ratio:
        usual = median(mine / theirs for mine, theirs in zip(above, below, strict=True))
        value = usual if self.time == "median" else min(above) / min(below)
        return Ratio(value, self.ends(above, below), usual)

    def of_contenders(self, contenders: Contenders, above: str, below: str, *, same_clock: bool = False) -> Ratio:
        """The ratio of two contenders' times. If a contender's time comes from only a few calls (`Slow`), its rounds do
        not show how large the error of this time is. Then the error is assumed to be as large as the speed of a quiet
        machine may vary, and the range is made wider by this error.

        With `same_clock`, a round counts only if both contenders had the same clock in it. If there is no such round,
        the ratio is computed from all rounds. It then has no range, so it decides nothing.
        """
        one, other = contenders[above], contenders[below]
        apart = at_another_clock(one, other) if same_clock else [False] * len(one.seconds)
        counts = [not differs or all(apart) for differs in apart]
        found = self.ratio(list(compress(one.seconds, counts)), list(compress(other.seconds, counts)))
        if all(apart):
            found = found._replace(interval=None)
        if found.interval and FEW_CALLS in (contenders[above].timed_by, contenders[below].timed_by):
            low, high = found.interval
            found = found._replace(interval=(low * (1 - OFF), high / (1 - OFF)))
        return found


def range_of_parts(above: list[float], below: list[float]) -> Interval | None:
    """The range of the parts' ratios, or None if there are too few rounds. Each part compares the contenders' fastest
    rounds within this part.

    The first part has the rounds 1, 4, 7, ..., the second part the rounds 2, 5, 8, ... So each part has rounds from the
    whole contest, and rounds with either order of the contenders. The ratio of all rounds always lies in this range.
    """
    if len(above) < PARTS * OF_A_PART:
        return None
    ratios = [min(above[part::PARTS]) / min(below[part::PARTS]) for part in range(PARTS)]
    return min(ratios), max(ratios)


def interval_of_ratios(above: list[float], below: list[float]) -> Interval | None:
    return interval([mine / theirs for mine, theirs in zip(above, below, strict=True)])


def interval(values: list[float]) -> Interval | None:
    """Two of the values. In at least 95 % of cases, the true median lies between these two, for any distribution.

    Each value is below the true median with probability 1/2. The median is below the r-th smallest value only if fewer
    than r values are below the median. For the r-th largest value, the same holds with "above". With fewer than six
    values, not even the smallest and the largest value are far enough apart: the result is None.
    """
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while (outside := outside + 2 * comb(count, rank) / 2**count) <= 1 - CONFIDENCE:
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else None


RULES = {
    "cpu": Rule("the fastest rounds", "fastest", range_of_parts),
    "cuda": Rule("the medians", "median", interval_of_ratios),
}


@dataclass(frozen=True)
class Verdict:
    value: float
    interval: Interval | None
    median: float
    by: str  # the name of the rule that judged
    against: str  # the contender that ours was compared with; empty if none
    outcome: str


def verdict(found: Ratio, by: str, against: str, holds: Callable[[float], bool] | None) -> Verdict:
    """`holds` tells whether a value meets the bound; it is None if there is no bound."""
    if holds is None:
        return Verdict(*found, by, against, REPORTED)
    held = {holds(end) for end in found.interval} if found.interval else {True, False}
    outcome = UNDECIDED if len(held) == 2 else MET if held == {True} else MISSED
    return Verdict(*found, by, against, outcome)


@dataclass(frozen=True)
class Faster:
    """A target: the time of the fastest contender in `than` is at least `times` x our time."""

    contest: str
    than: tuple[str, ...]
    times: float | None = None
    unit: ClassVar[str] = "x as fast"

    @property
    def bound(self) -> str:
        return f">= {self.times:g}x as fast" if self.times else ""

    def judge(self, contenders: Contenders, rule: Rule) -> Verdict | None:
        present = [name for name in self.than if name in contenders]
        if not present:
            return None
        rival = min(present, key=lambda name: rule.of(contenders[name]))
        holds = (lambda value: value >= self.times) if self.times else None
        return verdict(rule.of_contenders(contenders, rival, OURS), rule.name, rival, holds)


@dataclass(frozen=True)
class Within:
    """A target: our time is at most `times` x the time of the contender `of`. With `same_clock`, a round counts only if
    the GPU had the same clock for both contenders.
    """

    contest: str
    of: str
    times: float | None = None
    same_clock: bool = False
    unit: ClassVar[str] = "x the time"

    @property
    def bound(self) -> str:
        return f"<= {self.times:g}x the time{' at the same clock' * self.same_clock}" if self.times else ""

    def judge(self, contenders: Contenders, rule: Rule) -> Verdict | None:
        if self.of not in contenders:
            return None
        holds = (lambda value: value <= self.times) if self.times else None
        found = rule.of_contenders(contenders, OURS, self.of, same_clock=self.same_clock)
        return verdict(found, rule.name, self.of, holds)


@dataclass(frozen=True)
class Under:
    """A target: one call of ours takes at most this many microseconds."""

    contest: str
    microseconds: float
    unit: ClassVar[str] = " us"

    @property
    def bound(self) -> str:
        return f"<= {self.microseconds:g} us"

    def judge(self, contenders: Contenders, rule: Rule) -> Verdict | None:
        seconds = contenders[OURS].seconds
        found = rule.ratio(seconds, [1e-6] * len(seconds))
        return verdict(found, rule.name, "", lambda value: value <= self.microseconds)


@dataclass(frozen=True)
class ShareOf:
    """A target: ours reaches at least this percentage of the bandwidth of the fastest contender in `than`. The
    contenders in `than` move as many bytes as ours.

    The fastest contender is the one with the best time over all rounds. It is not chosen again in each round: that
    would choose the contender that was disturbed least in the round, and so compare ours with times that no single
    contender reaches.
    """

    contest: str
    than: tuple[str, ...]
    percent: float
    moves: int = 1  # how often the bytes of the size are moved; 2 if they are read and written
    unit: ClassVar[str] = "% of the bandwidth"

    @property
    def bound(self) -> str:
        return f">= {self.percent:g}%"

    def judge(self, contenders: Contenders, rule: Rule) -> Verdict | None:
        present = [name for name in self.than if name in contenders]
        if not present:
            return None
        rival = min(present, key=lambda name: rule.of(contenders[name]))
        share = rule.of_contenders(contenders, rival, OURS).times(100)
        return verdict(share, rule.name, rival, lambda value: value >= self.percent)


Target = Faster | Within | Under | ShareOf
