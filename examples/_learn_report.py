"""The tables, in Markdown, for both the terminal and the file. Every number in them was measured in this run."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev

from _learn_compare import Comparison
from _learn_setting import Run, Setting
from _learn_statistics import CONFIDENCE, Measure, measures, paired_difference, seconds_to

BASELINES = ("GRPO", "PODS")
LEVEL = "GRPO"  # the arm whose last reward is the level that the others should reach
LEVEL_READING = (
    f"Of each seed, when the reward first was as high as {LEVEL}'s of that seed at its end, between two evaluations if "
    "need be. `> 10.2`: not within the run, which ended then."
)
UPDATE = "update"


def report(setting: Setting, comparison: Comparison) -> str:
    plan = comparison.plan
    parts = [
        f"{conditions()} {seeds_of(plan.seeds)}; {setting.steps} steps of the optimiser, {setting.steps_per_batch} on "
        f"each of {math.ceil(setting.steps / setting.steps_per_batch)} batches of {setting.prompts} prompts x "
        f"{setting.group} rollouts; reward on {setting.held_out} held-out prompts, sampled; times are of training "
        f"alone, without evaluation, {how_many_at_a_time(setting)}.",
        how_tuned(comparison),
        "### Arms\n\n" + arms_table(comparison),
        *(
            f"### Reward against {base}, paired by seed\n\n{differences_table(comparison, base)}"
            for base in BASELINES
            if any(arm.name == base for arm in plan.arms) and len(plan.arms) > 1
        ),
        *(
            [f"### Seconds to {LEVEL}'s reward at its end\n\n{level_table(comparison.runs)}\n\n{LEVEL_READING}"]
            if any(arm.name == LEVEL for arm in plan.arms) and len(plan.arms) > 1
            else []
        ),
        reading(plan.seeds),
    ]
    return "\n\n".join(parts) + "\n"


def how_many_at_a_time(setting: Setting) -> str:
    runs = "one run" if setting.jobs == 1 else f"{setting.jobs} runs"
    threads = "one thread" if setting.threads == 1 else f"{setting.threads} threads"
    return f"{runs} at a time, {threads} each"


def conditions() -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "trl", "transformers", "d3s_kernels"))
    return f"{machine()}, {date.today():%d %B %Y}, Python {platform.python_version()}, {versions}{commit()}."


def commit() -> str:
    """The commit of this file's repository, if there is one, with a + if tracked files have changed since."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return f", commit {subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{found[1] if found else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def how_tuned(comparison: Comparison) -> str:
    plan = comparison.plan
    if not comparison.tuning:
        return "Learning rates were given, not tuned in this run."
    grid = ", ".join(f"{rate:g}" for rate in plan.learning_rates)
    edges = {min(plan.learning_rates), max(plan.learning_rates)}
    at_edge = [name for name, rate in comparison.learning_rates.items() if rate in edges]
    note = f" At the edge of the grid: {'; '.join(at_edge)}." if at_edge else ""
    return (
        f"Learning rates were tuned for each arm on {seeds_of(plan.tuning_seeds, 'other ')}, out of {grid}, "
        f"by the mean reward over the run.{note}"
    )


def arms_table(comparison: Comparison) -> str:
    rows = []
    for arm in comparison.plan.arms:
        runs = of_arm(comparison.runs, arm.name)
        found = [measures(run) for run in runs]
        last = [run.points[-1] for run in runs]
        rows.append(
            [
                arm.name,
                f"{comparison.learning_rates[arm.name]:g}",
                spread([point[Measure.END] for point in found]),
                spread([point[Measure.THROUGHOUT] for point in found]),
                f"{fmean(point.tokens for point in last):,.0f}",
                f"{fmean(point.total for point in last):.1f}",
                f"{fmean(point.seconds[UPDATE] for point in last):.1f}",
            ]
        )
    head = ["arm", "learning rate", "reward at the end", "mean over the run", "tokens in the loss", "seconds", "update"]
    return table(head, rows)


def differences_table(comparison: Comparison, base: str) -> str:
    ends = [[run.points[-1] for run in comparison.runs if run.job.seed == seed] for seed in comparison.plan.seeds]
    least = [(min(end.total for end in arms), min(end.tokens for end in arms)) for arms in ends]

    def values(name: str, measure: Measure) -> list[float]:
        runs = of_arm(comparison.runs, name)
        return [measures(run, *equal)[measure] for run, equal in zip(runs, least, strict=True)]

    rows = []
    for arm in comparison.plan.arms:
        if arm.name == base:
            continue
        row = [arm.name]
        for measure in Measure:
            difference = paired_difference(values(arm.name, measure), values(base, measure))
            interval = "" if difference.half_width is None else f" ± {difference.half_width:.3f}"
            row.append(f"{difference.mean:+.3f}{interval}, {difference.verdict}")
        rows.append(row)
    return table(["arm", *(measure.value for measure in Measure)], rows)


def level_table(runs: Sequence[Run]) -> str:
    levels = {run.job.seed: run.points[-1].reward for run in of_arm(runs, LEVEL)}
    rows = []
    for name in dict.fromkeys(run.job.arm for run in runs):
        found = [(run, seconds_to(run, levels[run.job.seed])) for run in of_arm(runs, name)]
        times = [f"> {run.points[-1].total:.1f}" if time is None else f"{time:.1f}" for run, time in found]
        rows.append([name, f"{sum(time is not None for _, time in found)} of {len(found)}", ", ".join(times)])
    return table(["arm", "seeds that reached it", "seconds, seed by seed"], rows)


def reading(seeds: Sequence[int]) -> str:
    equal = (
        "At equal time, at equal tokens: when the arm of that seed that needs the least has ended, between two "
        "evaluations if need be. That is one instant of the runs, and no measure of speed."
    )
    if len(seeds) == 1:
        return f"One seed says nothing about differences: another one may turn them round. {equal}"
    return (
        f"± is the half-width of the {CONFIDENCE:.0%} interval of the mean (Student's t of {len(seeds)} seeds), for "
        "each difference by itself; in the first table the standard deviation over seeds. An arm whose "
        f"interval holds 0 is neither better nor worse. {equal}"
    )


def seeds_of(seeds: Sequence[int], which: str = "") -> str:
    return f"{len(seeds)} {which}seed{'s' * (len(seeds) > 1)}"


def of_arm(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs of an arm, in the order of the seeds."""
    return sorted((run for run in runs if run.job.arm == name), key=lambda run: run.job.seed)


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
