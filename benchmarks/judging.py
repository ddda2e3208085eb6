"""Kinds of targets, and how each is judged: by the median over rounds of values measured in the same round."""

from dataclasses import dataclass
from statistics import quantiles
from typing import ClassVar

from .harness import OURS
from .timing import Contenders


@dataclass(frozen=True)
class Verdict:
    value: float
    quartiles: tuple[float, float]
    against: str  # the contender that ours was compared with; empty if none
    margin: float | None  # how many times better than the bound; None without a bound

    @property
    def met(self) -> bool | None:
        return None if self.margin is None else self.margin >= 1


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
        value, quartiles = spread(contenders[rival].over(contenders[OURS]))
        return Verdict(value, quartiles, rival, value / self.times if self.times else None)


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
        value, quartiles = spread(contenders[OURS].over(contenders[self.of]))
        return Verdict(value, quartiles, self.of, self.times / value if self.times else None)


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
        value, quartiles = spread([1e6 * seconds for seconds in contenders[OURS].seconds])
        return Verdict(value, quartiles, "", self.microseconds / value)


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
        value, quartiles = spread([100 * ratio for ratio in contenders[self.of].over(contenders[OURS])])
        return Verdict(value, quartiles, self.of, value / self.percent)


Target = Faster | Within | Under | ShareOf


def spread(values: list[float]) -> tuple[float, tuple[float, float]]:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return middle, (low, high)
