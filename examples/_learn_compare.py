"""The comparison: warms up models, tunes learning rates on some seeds, and compares the arms on other seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from _learn_arms import Arm, arms
from _learn_setting import Job, Run, Setting
from _learn_statistics import Measure, measures
from _learn_workers import Workers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Plan:
    arms: tuple[Arm, ...]
    learning_rates: tuple[float, ...]  # empty: each arm uses its own
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    plan: Plan
    tuning: tuple[Run, ...]
    learning_rates: dict[str, float]  # of each arm
    runs: tuple[Run, ...]


def compare(setting: Setting, plan: Plan, console: Console) -> Comparison:
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress, Workers(setting) as pool:
        grid = [(arm.name, rate) for arm in plan.arms for rate in plan.learning_rates]
        tuning_jobs = [Job(*point, seed) for seed in plan.tuning_seeds for point in grid]
        warm_up_seeds = [] if setting.model else [*plan.seeds, *plan.tuning_seeds]

        def all_of(description: str, work: Callable, tasks: Sequence, steps: int) -> list:
            if not tasks:
                return []
            bar = progress.add_task(description, total=len(tasks) * steps)
            return pool.map(work, tasks, lambda done: progress.advance(bar, done))

        all_of("Warming up", warm_up_job, warm_up_seeds, setting.warm_up_steps)
        tuning = all_of("Tuning learning rates", train_job, tuning_jobs, setting.steps)
        rates = best_rates(plan, tuning)
        jobs = [Job(arm.name, rates[arm.name], seed) for seed in plan.seeds for arm in plan.arms]
        runs = all_of("Comparing", train_job, jobs, setting.steps)
    return Comparison(plan, tuple(tuning), rates, tuple(runs))


def best_rates(plan: Plan, tuning: Sequence[Run]) -> dict[str, float]:
    """The rate of each arm with the largest mean reward over a run, which penalises slow starts and collapses alike."""
    if len(plan.learning_rates) == 1:
        return {arm.name: plan.learning_rates[0] for arm in plan.arms}
    if not tuning:
        return {arm.name: arm.learning_rate for arm in plan.arms}

    def quality(arm: Arm, rate: float) -> float:
        found = [run for run in tuning if (run.job.arm, run.job.learning_rate) == (arm.name, rate)]
        return fmean(measures(run)[Measure.THROUGHOUT] for run in found)

    return {arm.name: max(plan.learning_rates, key=lambda rate: quality(arm, rate)) for arm in plan.arms}


def warm_up_job(setting: Setting, seed: int, stepped: Callable[[int], None]) -> None:
    from _learn_problem import warm_up  # only in workers: torch and TRL take seconds to import

    warm_up(setting, seed, stepped)


def train_job(setting: Setting, job: Job, stepped: Callable[[int], None]) -> Run:
    from _learn_run import train

    arm = next(arm for arm in arms(setting.group) if arm.name == job.arm)
    return train(setting, arm, job, stepped)
