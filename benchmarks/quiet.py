"""Whether the machine was quiet while a CPU was measured. Two short probes before, between and after all rounds say it.

A probe takes two rates: of reading memory, and of a product of matrices. The level of a rate is what a tenth of the
probes so far have reached. It starts with `FIRST` probes, and only rises. A round is disturbed if a rate before or
after it is more than `OFF` below its level. It is then made again, in a contest at most as often as rounds count, and
in a run until `REPEAT_SECONDS` are spent. The contenders' times decide nothing here, so dropping rounds favours none.

At the end all rounds that count are judged again by the final level. A machine that is slow from the first probe to the
last is not seen by this, but by the levels of earlier results.
"""

import itertools
import json
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

OFF = 0.15  # of a level
FEW = 0.10  # of the rounds: a quiet run may have as many disturbed ones
FIRST = 25
REACHED = 0.9  # a level is this quantile of the probes
REPEAT_SECONDS = 240.0


class Rates(NamedTuple):
    read: float = 0.0  # GB/s
    product: float = 0.0  # GFLOP/s

    def below(self, level: "Rates") -> list[str]:
        """Which rates are too far below this level."""
        return [name for name in self._fields if getattr(self, name) < (1 - OFF) * getattr(level, name)]


def each(choose: Callable[[Iterable[float]], float], rates: Iterable[Rates]) -> Rates:
    """The lowest or the highest of each rate."""
    return Rates(*map(choose, zip(*rates, strict=True)))


class Probe:
    """Takes both rates: some 20 ms on two cores. Each is the median of three, since a call may be interrupted."""

    def __init__(self) -> None:
        # One part after the other, so that none is still in a cache: 384 MiB in all.
        self.parts = itertools.cycle(torch.ones(6, 16 * 2**20))
        self.matrix = torch.rand(768, 768)
        self.threads = torch.get_num_threads()

    def __call__(self) -> Rates:
        threads = torch.get_num_threads()  # fewer in the contests between ranks
        torch.set_num_threads(self.threads)
        try:
            read = self.seconds(lambda: next(self.parts).sum())
            product = self.seconds(lambda: self.matrix @ self.matrix)
        finally:
            torch.set_num_threads(threads)
        return Rates(64 * 2**20 / read / 1e9, 2 * len(self.matrix) ** 3 / product / 1e9)

    def seconds(self, work: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            start = perf_counter()
            work()
            times.append(perf_counter() - start)
        return median(times)


@dataclass(frozen=True)
class Watched:
    """What was seen during a contest: the lower rates around each round that counts."""

    lows: list[Rates]
    dropped: int
    level: Rates

    @classmethod
    def read(cls, facts: dict[str, Any]) -> "Watched":
        return cls([Rates(*low) for low in facts["lows"]], facts["dropped"], Rates(*facts["level"]))


class Watch:
    """Probes the machine, and decides which rounds are made again."""

    def __init__(self, probe: Callable[[], Rates]) -> None:
        self.probe = probe
        self.seen: tuple[list[float], list[float]] = [], []  # in order of size
        self.level = Rates()
        self.seconds_left = REPEAT_SECONDS
        probe()  # warms up
        for _ in range(FIRST):
            self.look()

    def look(self) -> Rates:
        self.last = self.probe()
        for seen, rate in zip(self.seen, self.last, strict=True):
            insort(seen, rate)
        if len(self.seen[0]) >= FIRST:
            reached = Rates(*(seen[int(REACHED * len(seen))] for seen in self.seen))
            self.level = each(max, [self.level, reached])
        return self.last

    def start(self, fewest_rounds: int) -> None:
        """Before the first round of a contest."""
        self.fewest_rounds, self.lows, self.dropped = fewest_rounds, [], 0
        self.look()

    def repeats(self, seconds: float) -> bool:
        """Whether the round that ended now, after so many seconds, is made again. If not, it counts."""
        low = each(min, [self.last, self.look()])
        may = self.dropped < max(self.fewest_rounds, len(self.lows)) and self.seconds_left > 0
        if may and low.below(self.level):
            self.dropped += 1
            self.seconds_left -= seconds
            return True
        self.lows.append(low)
        return False

    def watched(self) -> Watched:
        return Watched(self.lows, self.dropped, self.level)


@dataclass(frozen=True)
class Judged:
    """A whole run."""

    level: Rates
    rounds: int
    disturbed: int
    dropped: int
    earlier: Rates  # the highest levels of this machine's earlier results

    @property
    def quiet(self) -> bool:
        return self.disturbed <= FEW * self.rounds

    @property
    def said(self) -> str:
        level, earlier = self.level, self.earlier
        said = (
            f"The machine was {'' if self.quiet else 'not '}quiet: around {self.disturbed} of {self.rounds} rounds it "
            f"was more than {OFF:.0%} below its level (reads {level.read:.1f} GB/s, products {level.product:.0f} "
            f"GFLOP/s); a quiet run has at most {FEW:.0%} of these. {self.dropped} others were dropped and made again."
        )
        for name in level.below(earlier):
            slower = 1 - getattr(level, name) / getattr(earlier, name)
            said += f" Its level of {name}s is {slower:.0%} lower than in an earlier run: it was slow throughout."
        return said

    def data(self) -> dict[str, Any]:
        rates = {"level": self.level._asdict(), "earlier": self.earlier._asdict()}
        return asdict(self) | rates | {"quiet": self.quiet, "said": self.said}


def judge(contests: list[Watched], earlier: Rates) -> Judged:
    level = each(max, [watched.level for watched in contests])
    lows = [low for watched in contests for low in watched.lows]
    disturbed = sum(bool(low.below(level)) for low in lows)
    return Judged(level, len(lows), disturbed, sum(watched.dropped for watched in contests), earlier)


def earlier_level(results: Path, machine: str) -> Rates:
    """The highest levels that this machine's results have; zeros without any."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")]
    levels = [Rates(**run["quiet"]["level"]) for run in runs if run["machine"] == machine and run.get("quiet")]
    return each(max, [Rates(), *levels])
