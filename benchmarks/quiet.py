"""Measures how quiet the machine was during a run on a CPU, by short probes before, between and after all rounds.

A probe measures two rates: how fast memory is read, and how fast a matrix product is computed. The level of a rate is
the value that only the best tenth of a process's probes reach. A run is quiet if few of its probes are far below the
level. The probes decide nothing else: contenders are judged by their fastest rounds, which were not disturbed
(judging.py).

If a machine is slow from the first probe to the last, the probes of this run do not show it. A comparison with the
levels of earlier results shows it.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

OFF = 0.15  # a rate is far below a level if it is lower by more than this share of the level
FEW = 0.10  # the share of probes that may be far below the level in a quiet run
REACHED = 0.9  # a level is this quantile of the probes


class Rates(NamedTuple):
    read: float = 0.0  # GB/s
    product: float = 0.0  # GFLOP/s

    def below(self, level: "Rates") -> list[str]:
        """Which rates are too far below this level."""
        return [name for name in self._fields if getattr(self, name) < (1 - OFF) * getattr(level, name)]


class Probe:
    """Measures both rates, which takes 20 ms on two cores. Each rate is a median of three calls, since one call may be
    interrupted.
    """

    def __init__(self) -> None:
        # The parts have 384 MiB together. They are read in turn, so that no part is still in a cache when it is read
        # again.
        self.parts = itertools.cycle(torch.ones(6, 16 * 2**20))
        self.matrix = torch.rand(768, 768)
        self.threads = torch.get_num_threads()

    def __call__(self) -> Rates:
        threads = torch.get_num_threads()  # fewer than at the start in the contests between ranks
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
class Judged:
    """The probes of a whole run."""

    level: Rates
    probes: int
    low: int
    earlier: Rates  # the highest levels of this machine's earlier results

    @property
    def quiet(self) -> bool:
        return self.low <= FEW * self.probes

    @property
    def said(self) -> str:
        level, earlier = self.level, self.earlier
        said = (
            f"The machine was {'' if self.quiet else 'not '}quiet: {self.low} of {self.probes} probes between rounds "
            f"were more than {OFF:.0%} below its level (reads {level.read:.1f} GB/s, products {level.product:.0f} "
            f"GFLOP/s); a quiet run has at most {FEW:.0%} of these."
        )
        for name in level.below(earlier):
            slower = 1 - getattr(level, name) / getattr(earlier, name)
            said += f" Its level of {name}s is {slower:.0%} lower than in an earlier run: it was slow throughout."
        return said

    def data(self) -> dict[str, Any]:
        rates = {"level": self.level._asdict(), "earlier": self.earlier._asdict()}
        return asdict(self) | rates | {"quiet": self.quiet, "said": self.said}


def judge(processes: list[list[Rates]], earlier: Rates) -> Judged:
    levels = [level_of(probes) for probes in processes]
    low = sum(bool(probe.below(level)) for probes, level in zip(processes, levels, strict=True) for probe in probes)
    return Judged(highest(levels), sum(map(len, processes)), low, earlier)


def level_of(probes: list[Rates]) -> Rates:
    return Rates(*(sorted(rates)[int(REACHED * len(probes))] for rates in zip(*probes, strict=True)))


def highest(levels: list[Rates]) -> Rates:
    """The highest value of each rate; zeros if there are no levels."""
    return Rates(*map(max, zip(Rates(), *levels, strict=True)))


def earlier_level(results: Path, machine: str, threads: int) -> Rates:
    """The highest levels of this machine's results with the same number of threads."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")]
    same = [run for run in runs if (run["machine"], run.get("threads")) == (machine, threads) and run.get("quiet")]
    return highest([Rates(**run["quiet"]["level"]) for run in same])
