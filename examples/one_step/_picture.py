"""The picture of the kept tokens and rollouts, coloured by |advantage| x entropy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from _report import question
from _step import Step
from _task import Rollouts, Task
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from torch import Tensor

if TYPE_CHECKING:
    from _run import Point

KEPT = ListedColormap(mpl.colormaps["inferno_r"](np.linspace(0.15, 0.9, 256)))
LEFT_OUT, DROPPED = "#dbe6f2", "#d6d6d6"
RIGHT, WRONG = "#2e9d5b", "#c9433f"


def save_picture(path: Path, task: Task, batch: Rollouts, entropy: Tensor, points: list[Point]) -> None:
    """Draws the whole batch at each point of the schedule; below it, one group at the middle point, with its text."""
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    scores = (batch.advantages.abs()[:, None] * entropy).numpy()
    kept = np.concatenate([scores[point.ours.tokens.numpy()] for point in points])
    scale = Normalize(kept.min(), np.quantile(kept, 0.99), clip=True)

    figure = Figure(figsize=(15, 13), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[2.2, 1])
    draw_batch(above, batch, scores, scale, points)
    draw_group(below.subplots(), task, batch, scores, scale, points[len(points) // 2])
    figure.savefig(path, dpi=130)


def draw_batch(figure: SubFigure, batch: Rollouts, scores: np.ndarray, scale: Normalize, points: list[Point]) -> None:
    group_size = len(batch) // len(batch.questions)
    middles = np.arange(len(batch.questions)) * group_size + (group_size - 1) / 2
    panels = figure.subplots(1, len(points), sharey=True)
    for axes, point in zip(panels, points, strict=True):
        axes.imshow(cell_colours(batch, scores, scale, point.ours), aspect="auto", interpolation="nearest")
        draw_rewards(axes, batch)
        for edge in middles[1:] - group_size / 2:
            axes.axhline(edge, color="white", linewidth=4)
        rollouts, tokens = int(point.ours.rollouts.sum()), int(point.ours.tokens.sum())
        axes.set_title(f"progress {point.progress:g}\n{rollouts} of {len(batch)} rollouts, {tokens} tokens kept")
        axes.set_xlabel("token of the answer")
        axes.set_yticks(middles, [question(batch, int(middle)) for middle in middles])
        axes.tick_params(left=False)
    panels[0].set_ylabel(f"prompt, with its {group_size} rollouts")
    colour_bar = figure.colorbar(ScalarMappable(scale, KEPT), ax=panels, pad=0.01, aspect=40, extend="max")
    colour_bar.set_label("|advantage| x entropy of a kept token (nats)")
    figure.suptitle("Which tokens of which rollouts a D3S step trains on", fontsize=16, fontweight="bold")
    figure.legend(
        handles=[
            Patch(color=KEPT(0.6), label="kept token"),
            Patch(color=LEFT_OUT, label="other token of a kept rollout"),
            Patch(color=DROPPED, label="dropped rollout"),
            Patch(color=RIGHT, label="right answer"),
            Patch(color=WRONG, label="wrong answer"),
        ],
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )


def draw_group(axes: Axes, task: Task, batch: Rollouts, scores: np.ndarray, scale: Normalize, point: Point) -> None:
    """Draws the group with the most kept tokens."""
    group = int(batch.grouped(point.ours.tokens.sum(1)).sum(1).argmax())
    group_size = len(batch) // len(batch.questions)
    members = range(group * group_size, (group + 1) * group_size)
    colours = cell_colours(batch, scores, scale, point.ours)[members]
    length = int(batch.mask[list(members)].sum(1).max())

    axes.imshow(colours[:, :length], aspect="auto", interpolation="nearest")
    for y, rollout in enumerate(members):
        for x, text in enumerate(task.read(batch.labels[rollout])):
            dark = colours[y, x] @ (0.3, 0.59, 0.11) < 0.5
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "#222222")
    draw_rewards(axes, batch, members)
    axes.set_yticks(range(group_size), [f"A = {batch.advantages[rollout]:+.2f}" for rollout in members])
    axes.tick_params(left=False)
    axes.set_xlabel("token of the answer")
    axes.set_ylabel("rollout, with its advantage")
    axes.set_title(f'The answers to "{question(batch, members[0])}" at progress {point.progress:g}', fontweight="bold")


def cell_colours(batch: Rollouts, scores: np.ndarray, scale: Normalize, step: Step) -> np.ndarray:
    """The colour of each token, [B, T, 3]; white after the end of an answer."""
    mask, rollouts, tokens = batch.mask.numpy(), step.rollouts.numpy(), step.tokens.numpy()
    colours = np.ones((*mask.shape, 3))
    colours[mask] = to_rgb(DROPPED)
    colours[mask & rollouts[:, None]] = to_rgb(LEFT_OUT)
    colours[tokens] = KEPT(scale(scores[tokens]))[:, :3]
    return colours


def draw_rewards(axes: Axes, batch: Rollouts, members: range | None = None) -> None:
    """Draws a square before each rollout that shows whether its answer is right."""
    rewards = batch.rewards[list(members)] if members else batch.rewards
    colours = [RIGHT if reward else WRONG for reward in rewards.tolist()]
    axes.scatter(np.full(len(colours), -1.2), np.arange(len(colours)), c=colours, marker="s", s=12, clip_on=False)
    axes.set_xlim(left=-1.8)
