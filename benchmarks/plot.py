"""A picture of a run: how far each target is met or missed."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator

from .report import Line

MET, MISSED, INK = "#2a9d8f", "#e76f51", "#264653"


def save(path: Path, title: str, subtitle: str, judged: list[Line]) -> None:
    """Draws one bar for each target: to the right of the line it is met, to the left it is missed."""
    bars = [line for line in judged if line.verdict and line.verdict.margin is not None][::-1]
    margins = [line.verdict.margin for line in bars]
    figure, axes = plt.subplots(figsize=(13, 1.6 + 0.34 * len(bars)), layout="constrained")
    colours = [MET if line.verdict.met else MISSED for line in bars]
    axes.barh([label(line) for line in bars], [margin - 1 for margin in margins], left=1, color=colours, height=0.66)
    for row, line in enumerate(bars):
        axes.annotate(
            f"{line.value}, target {line.bound}",
            xy=(1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=MET if line.verdict.met else MISSED,
        )
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9 * min([1.0, *margins]), min(16, 1.1 * max([1.0, *margins])))  # a longer bar is cut
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x" if x >= 1 else f"1/{1 / x:g}"))
    axes.set_xlabel("how many times better than its target", color=INK)
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.margins(y=0.01)
    axes.spines[:].set_visible(False)
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.01, 0.995 - 0.34 / figure.get_figheight(), subtitle, va="top", fontsize=9.5, color=INK)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def label(line: Line) -> str:
    return f"{line.what}  vs  {line.verdict.against}" if line.verdict.against else line.what
