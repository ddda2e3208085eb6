"""Draws D3S's budget over the course of training, for its three shapes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import PercentFormatter
from style import PHASES, new_figure, save

import d3s_kernels as d3s

PROGRESS = [step / 1000 for step in range(1001)]
SHAPES = ("linear", "cosine", "exponential")


def draw_schedule(path: Path) -> None:
    figure = new_figure(2.6)
    rollouts, tokens = figure.subplots(1, 2)
    for shape, colour in zip(SHAPES, PHASES, strict=True):
        budgets = [d3s.DownSamplingSchedule(shape=shape)(progress) for progress in PROGRESS]
        label = f"{shape} (the paper's)" if shape == "linear" else shape
        rollouts.plot(PROGRESS, [budget.rollouts for budget in budgets], color=colour, label=label)
        tokens.plot(PROGRESS, [budget.token_ratio for budget in budgets], color=colour, label=label)
    rollouts.set(ylabel="rollouts of each group", ylim=(0, 34), yticks=[0, 8, 16, 24, 32])
    tokens.set(ylabel="share of their tokens", ylim=(0, 0.215), yticks=[0, 0.05, 0.1, 0.15, 0.2])
    tokens.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (rollouts, tokens):
        axes.set(xlabel="share of training that is done", xlim=(0, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(alpha=0.3)
    tokens.legend(loc="lower right", frameon=False)
    halfway = [d3s.DownSamplingSchedule(shape=shape)(0.5).rollouts for shape in SHAPES]
    save(figure, path, f"rollouts halfway: {dict(zip(SHAPES, halfway, strict=True))}")
