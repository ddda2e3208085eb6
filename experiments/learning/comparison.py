"""The finished runs of an experiment, by arm, and the clocks by which they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from . import records
from .arms import arms
from .ledger import Counts
from .pricings import pricings
from .records import Run
from .setting import Setting
from .stages import known_prices, measured_prices, prices_file
from .statistics import Clock, mean_until, reached

MEASURES = {"mean": "mean Pass@1 over the time", "first": "Pass@1 at the end", "any": "Pass@8 at the end"}
LONGER = {"longer_first": "Pass@1 of longer chains", "longer_any": "Pass@8 of longer chains"}  # at the end of a run
WHOLE_STEPS = "whole steps as measured"

Clocks = Mapping[str, Clock]
"""Of each arm, the time that something took."""


class Comparison:
    """The runs by arm and seed, arms in their usual order. ``clocks`` has a clock of each arm for each pricing."""

    def __init__(self, setting: Setting, runs: Sequence[Run]) -> None:
        there = {run.job.arm for run in runs}
        self.arms = [name for name in arms(setting.many, setting.few) if name in there]
        self.runs = {arm: sorted((r for r in runs if r.job.arm == arm), key=lambda r: r.job.seed) for arm in self.arms}
        self.baselines = [f"GRPO-{count}" for count in (setting.many, setting.few) if f"GRPO-{count}" in self.runs]
        self.prices, self.horizon = known_prices(setting)
        named = pricings(measured_prices(setting), self.mean_counts([*self.baselines, *self.arms][0]))
        named = {**named, setting.pricing: self.prices}  # by which the runs were timed
        self.clocks = {name: dict.fromkeys(self.arms, prices.of) for name, prices in named.items()}
        self.clocks[WHOLE_STEPS] = {arm: whole_steps(setting, arm) for arm in self.arms}
        self.own_clocks = self.clocks[setting.pricing]

    def mean_counts(self, arm: str) -> Counts:
        ends = [run.points[-1].counts for run in self.runs[arm]]
        return Counts(*(round(fmean(column)) for column in zip(*ends, strict=True)))

    def common_end(self, clocks: Clocks) -> float:
        """The latest time that every run has reached."""
        return min(clocks[arm](run.points[-1].counts) for arm, runs in self.runs.items() for run in runs)

    def values(self, arm: str, clocks: Clocks, time: float, measure: str) -> list[float]:
        if measure == "mean":
            return [mean_until(run, clocks[arm], time) for run in self.runs[arm]]
        if measure in LONGER:
            return [getattr(run.points[-1], measure) for run in self.runs[arm]]
        return [reached(run, clocks[arm], time, measure) for run in self.runs[arm]]

    @property
    def has_longer(self) -> bool:
        """Whether longer chains were evaluated too."""
        return next(iter(self.runs.values()))[0].points[-1].longer_first is not None


def whole_steps(setting: Setting, arm: str) -> Clock:
    """The measured prices, times what a whole step of this arm took of what it is priced at.

    Small batches are less efficient: their steps take longer than the sum of their pieces.
    """
    step, prices = prices_file(setting)["steps"][arm], measured_prices(setting)
    return lambda counts: step["measured"] / step["priced"] * prices.of(counts)


def load(setting: Setting, name: str = "curves") -> Comparison:
    return Comparison(setting, records.load(setting.folder / f"{name}.csv"))
