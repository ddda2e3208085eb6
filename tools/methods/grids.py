"""Draws a grid for each rule: a row is a group or sequence, a cell a rollout or token; kept cells have a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from style import INK, new_figure, save
from torch import Tensor

DROPPED = 0.3  # opacity


@dataclass(frozen=True)
class Panel:
    title: str
    values: Tensor  # the value of each cell, which sets its colour
    kept: Tensor | None  # kept cells; None if the panel shows no choice
    text: Sequence[Sequence[str]] | None = None  # the text of each cell
    shown: Tensor | None = None  # cells to draw; None for all
    rows: Sequence[str] = ()  # labels of the rows


def draw_grids(
    path: Path, panels: Sequence[Panel], columns: int, *, colours: str, low: float, high: float, height: float
) -> None:
    figure = new_figure(height)
    places = figure.subplots(-(-len(panels) // columns), columns).flatten()
    for axes, panel in zip(places, panels, strict=True):
        draw(axes, panel, colours, Normalize(low, high, clip=True))
    save(figure, path, "\n".join(in_words(panel) for panel in panels))


def draw(axes: Axes, panel: Panel, colours: str, scale: Normalize) -> None:
    rows, columns = panel.values.shape
    for row in range(rows):
        for column in range(columns):
            if panel.shown is None or panel.shown[row, column]:
                draw_cell(axes, panel, row, column, colormaps[colours](scale(float(panel.values[row, column]))))
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal", xticks=[])
    axes.set_yticks([row + 0.5 for row in range(len(panel.rows))], panel.rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(panel.title, loc="left")


def draw_cell(axes: Axes, panel: Panel, row: int, column: int, colour: tuple[float, ...]) -> None:
    framed = panel.kept is not None and bool(panel.kept[row, column])
    full = framed or panel.kept is None
    axes.add_patch(
        Rectangle(
            (column + 0.06, row + 0.06),
            0.88,
            0.88,
            facecolor=(*colour[:3], 1.0 if full else DROPPED),
            edgecolor=INK if framed else "#dddddd",
            linewidth=1.6 if framed else 0.5,
        )
    )
    if panel.text is not None:
        red, green, blue, _ = colour
        dark = full and 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        axes.text(
            column + 0.5,
            row + 0.52,
            panel.text[row][column],
            ha="center",
            va="center",
            fontsize=7,
            color="white" if dark else INK if full else "#777777",
        )


def in_words(panel: Panel) -> str:
    """The text of each cell, or a dot, with an asterisk if the cell is kept."""
    text = panel.text or [["."] * panel.values.shape[1]] * panel.values.shape[0]
    kept = panel.values.new_zeros(panel.values.shape) if panel.kept is None else panel.kept
    rows = (
        " ".join(cell + "*" * mark for cell, mark in zip(*row, strict=True))
        for row in zip(text, kept.int().tolist(), strict=True)
    )
    return f"{' '.join(panel.title.split())}: {'; '.join(rows)}"
