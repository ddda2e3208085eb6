"""The picture: Pass@1 over priced time, at three prices of generation, and the gradient probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from . import probe as probing
from .arms import arms
from .comparison import Clocks, Comparison, load
from .pricings import unit
from .setting import Setting
from .statistics import reached

COLOURS = (  # of the arms, in their order
    "#222222", "#4575b4", "#999999", "#e08214", "#7fbf7b", "#1b7837", "#c51b7d", "#8c510a", "#d8b365",
    "#222222", "#4575b4", "#e08214", "#7fbf7b", "#c51b7d",  # with old samples: dashed
)  # fmt: skip
SHOWN = ("generation at 0.4 of GRPO's update", "generation at 3")  # beside the pricing of the runs


def save(setting: Setting, path: Path, name: str = "curves") -> None:
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    comparison = load(setting, name)
    styles = {
        arm.name: {"color": colour, "linestyle": "--" if arm.staleness else "-"}
        for arm, colour in zip(arms(setting.many, setting.few).values(), COLOURS, strict=True)
    }
    probe = setting.folder / "probe.csv"
    names = (setting.pricing, *SHOWN)
    figure = Figure(figsize=(15, 9 if probe.exists() else 5), layout="constrained")
    rows = figure.subplots(2 if probe.exists() else 1, len(names), squeeze=False)
    for axes, shown in zip(rows[0], names, strict=True):
        curves(axes, comparison, comparison.clocks[shown], styles)
        axes.set_xlabel(f"{unit(shown)}, {shown}")
    rows[0][0].set_ylabel("Pass@1, held-out prompts")
    if probe.exists():
        bars(rows[1], probing.load(probe))
    seeds = len(comparison.runs[comparison.arms[0]])
    figure.suptitle(
        f"What selection gives for the same priced time: means of {seeds} seeds, bands of one standard error"
    )
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=130)


def curves(axes: Axes, comparison: Comparison, clocks: Clocks, styles: Mapping[str, Mapping[str, str]]) -> None:
    end = comparison.common_end(clocks)
    times = np.linspace(0, end, 60)
    for arm in comparison.arms:
        values = np.array([[reached(run, clocks[arm], time) for time in times] for run in comparison.runs[arm]])
        middle, error = values.mean(0), values.std(0, ddof=min(1, len(values) - 1)) / np.sqrt(len(values))
        axes.fill_between(times, middle - error, middle + error, color=styles[arm]["color"], alpha=0.15, linewidth=0)
        axes.plot(times, middle, **styles[arm], label=arm, linewidth=1.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(alpha=0.3)


def bars(rows: np.ndarray, found: list[probing.Probed]) -> None:
    for axes, level in zip(rows, sorted({one.level for one in found}), strict=True):
        here = [one for one in found if one.level == level]
        axes.barh([one.arm for one in here], [one.per_second / here[0].per_second for one in here], color=COLOURS)
        axes.axvline(1, color="#222222", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(f"at a Pass@1 of {level:.0%}", fontsize="medium", pad=12)
        axes.set_xlabel(f"signal to noise for a priced second, {here[0].arm} = 1")
        if axes is not rows[0]:
            axes.set_yticklabels([])
