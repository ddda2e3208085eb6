"""The picture: held-out reward against steps, tokens and seconds, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from _learn_compare import Comparison
from _learn_report import of_arm
from _learn_setting import Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

COLOURS = {
    "GRPO": "#444444",
    "PODS": "#e08214",
    "D3S-I": "#7fbf7b",
    "D3S": "#1b7837",
    "D3S, no schedule": "#5aaed6",
    "GSPO": "#c51b7d",
    "GSPO + D3S": "#762a83",
}
PHASE_COLOURS = ("#4575b4", "#91bfdb", "#d73027", "#cccccc")


def save_plot(path: Path, comparison: Comparison) -> None:
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(14, 9.5), layout="constrained")
    (steps, tokens), (seconds, phases) = figure.subplots(2, 2)
    curves = [(arm.name, of_arm(comparison.runs, arm.name)) for arm in comparison.plan.arms]
    for name, runs in curves:
        draw_curve(steps, name, runs, [[point.step for point in run.points] for run in runs])
        draw_curve(tokens, name, runs, [[point.tokens or np.nan for point in run.points] for run in runs])
        draw_curve(seconds, name, runs, [[point.total for point in run.points] for run in runs])
    steps.set_xlabel("step of the optimiser")
    tokens.set_xlabel("tokens that had a gradient")
    tokens.set_xscale("log")  # the first point, with 0 tokens, is left out
    seconds.set_xlabel("seconds of training (evaluation not counted)")
    for axes in (steps, tokens, seconds):
        axes.set_ylabel("held-out reward")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(alpha=0.3)
    draw_phases(phases, curves)
    count = len(comparison.plan.seeds)
    seeds = "one seed" if count == 1 else f"mean of {count} seeds, band from the lowest to the highest"
    figure.suptitle(f"Learning from some of the rollouts and tokens: {seeds}", fontsize=14)
    figure.legend(*steps.get_legend_handles_labels(), loc="outside lower center", ncols=len(curves), frameon=False)
    figure.savefig(path, dpi=130)


def draw_curve(axes: Axes, name: str, runs: Sequence[Run], x: Sequence[Sequence[float]]) -> None:
    """Draws the mean over seeds, of x and of the reward, with a band from the lowest to the highest reward."""
    rewards = np.array([[point.reward for point in run.points] for run in runs])
    middle = np.mean(x, axis=0)
    axes.fill_between(middle, rewards.min(0), rewards.max(0), color=COLOURS[name], alpha=0.12, linewidth=0)
    axes.plot(middle, rewards.mean(0), color=COLOURS[name], label=name, linewidth=1.8)


def draw_phases(axes: Axes, curves: Sequence[tuple[str, Sequence[Run]]]) -> None:
    names = [name for name, _ in curves]
    left = np.zeros(len(curves))
    ends = [[run.points[-1].seconds for run in runs] for _, runs in curves]
    totals = np.array([np.mean([sum(end.values()) for end in arm]) for arm in ends])
    for phase, colour in zip(ends[0][0], PHASE_COLOURS, strict=True):
        seconds = np.array([np.mean([end[phase] for end in arm]) for arm in ends])
        axes.barh(names, seconds, left=left, color=colour, label=phase)
        for y, (width, start, total) in enumerate(zip(seconds, left, totals, strict=True)):
            if width > 0.06 * totals.max():
                axes.text(start + width / 2, y, f"{width / total:.0%}", ha="center", va="center", fontsize=9)
        left += seconds
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a run, by phase")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
