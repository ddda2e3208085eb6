"""Draws the first picture of README.md. A unit is a pixel of a narrow phone, where the picture is WIDTH units wide."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from methods.style import INK, PALE, PHASES, save
from methods.style import WIDTH as INCHES

if TYPE_CHECKING:
    from overview import Shown

WIDTH, MARGIN = 358, 12
ABOVE, HEADING = 8, 22  # the space above a heading, and the heading's height
SMALL, USUAL, LARGE = 9.5, 10.5, 14  # sizes of text
LINE_OF_NOTE = 61  # letters
LETTER = 0.602 * USUAL  # the width of each letter of DejaVu Sans Mono
KEPT, SCORE, QUIET, GROUND, LINE = *PHASES[:2], "#59636e", "#f6f8fa", "#c4ccd4"
HIGH, STEP = 14, 17  # the height of a cell or a bar, and the distance from one to the next


def draw(path: Path, shown: Shown) -> None:
    figure = Figure(facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH))
    axes.axis("off")
    place = 0.0
    for heading, part in zip(shown.headings, (draw_rollouts, draw_tokens, draw_times), strict=True):
        place += ABOVE
        write(axes, MARGIN, place + 8, heading[0], LARGE, weight="bold")
        write(axes, WIDTH - MARGIN, place + 8, heading[1], LARGE, KEPT, weight="bold", ha="right")
        place = part(axes, place + HEADING, shown)
    for line in wrap(shown.note, LINE_OF_NOTE):
        write(axes, MARGIN, place + 8, line, SMALL, QUIET)
        place += 12.5
    height = place + MARGIN - 3
    axes.set_ylim(height, 0)
    figure.set_size_inches(INCHES, INCHES * height / WIDTH)
    save(figure, path, shown.words())


def draw_rollouts(axes: Axes, top: float, shown: Shown) -> float:
    """Draws a row for each question, with a cell for each answer that shows whether it is right and whether it is kept.
    Like the other parts, returns where the next part can begin.
    """
    for question, rewards, kept in zip(shown.questions, shown.rewards, shown.kept, strict=True):
        write(axes, MARGIN, top + HIGH / 2, question, SMALL)
        for place, (reward, keep) in enumerate(zip(rewards, kept, strict=True)):
            left = cell(place, len(rewards))
            box(axes, left, top, HIGH, HIGH, KEPT if keep else "white", KEPT if keep else LINE)
            mark, colour = "✓" if reward else "✗", "white" if keep else PALE
            write(axes, left + HIGH / 2, top + HIGH / 2, mark, USUAL, colour, ha="center")
        top += STEP
    return top


def cell(place: int, cells: int) -> float:
    """The left side of a cell."""
    return WIDTH - MARGIN - HIGH - STEP * (cells - 1 - place)


def draw_tokens(axes: Axes, top: float, shown: Shown) -> float:
    """Draws the answer to which a line leads from its cell: tokens shaded by score, kept ones bold and underlined."""
    left, lines, placed = MARGIN + 7, 1, []
    x = left
    for number, token in enumerate(shown.tokens):
        rest = "".join(after.text for after in shown.tokens[number + 1 :]).partition(" ")[0]  # the word's rest
        if token.text.startswith(" ") and x + len(token.text + rest) * LETTER > WIDTH - left:
            x, lines = left, lines + 1
            token = token._replace(text=token.text.lstrip() or " ")
        placed.append((x, top + STEP * (lines - 1) + 5, token))
        x += len(token.text) * LETTER
    centre = cell(shown.opened, len(shown.kept[-1])) + HIGH / 2
    above = top - HEADING - ABOVE - STEP + HIGH
    axes.plot((centre, centre), (above, top), color=KEPT, linewidth=4)
    box(axes, MARGIN, top, WIDTH - 2 * MARGIN, STEP * lines + 6, GROUND, KEPT)
    for x, y, token in placed:
        width = len(token.text) * LETTER
        axes.add_patch(Rectangle((x, y), width, 14, facecolor=SCORE, alpha=0.8 * token.shade, linewidth=0))
        write(axes, x, y + 7, token.text, USUAL, family="monospace", weight="bold" if token.kept else "normal")
        if token.kept:
            axes.plot((x, x + width), (y + 14.6,) * 2, color=KEPT, linewidth=4, solid_capstyle="butt")
    return top + STEP * lines + 6


def draw_times(axes: Axes, top: float, shown: Shown) -> float:
    left, right = 110, WIDTH - MARGIN - 45
    for name, time in shown.milliseconds.items():
        ours = name == list(shown.milliseconds)[-1]
        colour, weight = (KEPT, "bold") if ours else (PALE, "normal")
        length = (right - left) * time / max(shown.milliseconds.values())
        write(axes, MARGIN, top + HIGH / 2, name, SMALL, weight=weight)
        box(axes, left, top, length, HIGH, colour, colour)
        write(axes, left + length + 6, top + HIGH / 2, f"{time:.0f} ms", USUAL, weight=weight)
        top += STEP
    return top


def box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, line: str) -> None:
    style = "round,pad=0,rounding_size=2.5"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=line, linewidth=2))


def write(axes: Axes, x: float, y: float, text: str, size: float, colour: str = INK, **more: Any) -> None:
    axes.text(x, y, text, fontsize=size * INCHES * 72 / WIDTH, color=colour, va="center_baseline", **more)
