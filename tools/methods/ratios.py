"""Draws how the ratios of tokens, sequences and entropy groups differ for the same log-probabilities, and which tokens
are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batch import ENTROPY, GROUPS, TOKEN_ADVANTAGES, TOKEN_MASK, moved
from matplotlib.axes import Axes
from style import INK, PHASES, new_figure, save
from torch import Tensor

import d3s_kernels as d3s

VOCABULARY = 151_936
LOW_ENTROPY, HIGH_ENTROPY = PHASES[0], PHASES[1]
CLIPPED = "#c51b20"


@dataclass(frozen=True)
class Level:
    title: str
    ratio: Tensor
    low: Tensor  # how far a ratio may be below 1
    high: Tensor  # how far a ratio may be above 1

    @property
    def clipped(self) -> Tensor:
        """The tokens for which the minimum in PPO's objective is the clipped, constant term: they have no gradient."""
        up = (TOKEN_ADVANTAGES > 0).unsqueeze(-1) & (self.ratio > 1 + self.high)
        down = (TOKEN_ADVANTAGES < 0).unsqueeze(-1) & (self.ratio < 1 - self.low)
        return (up | down) & TOKEN_MASK


def levels() -> list[Level]:
    logprob, old = moved()
    alike = ENTROPY.new_ones(ENTROPY.shape)
    epsilon = d3s.adaptive_clip(ENTROPY, GROUPS, TOKEN_MASK, vocab_size=VOCABULARY)

    def ratio(level: str, **options: object) -> Tensor:
        return d3s.importance_ratio(logprob, old, TOKEN_MASK, level=level, **options)

    of_groups, literal = ratio("entropy_group", groups=GROUPS), ratio("entropy_group", groups=GROUPS, denominator="old")
    return [
        Level('GRPO: level="token", clip 0.2', ratio("token"), 0.2 * alike, 0.2 * alike),
        Level('GSPO: level="sequence", clip 3e-4, 4e-4', ratio("sequence"), 3e-4 * alike, 4e-4 * alike),
        Level('ESPO: level="entropy_group", adaptive_clip', of_groups, epsilon, epsilon),
        Level('ESPO as printed: denominator="old"', literal, epsilon, epsilon),
    ]


def draw_ratios(path: Path) -> None:
    found = levels()
    figure = new_figure(9.0)
    rows = (int((TOKEN_ADVANTAGES > 0).nonzero()[0]), int((TOKEN_ADVANTAGES < 0).nonzero()[0]))
    for column, (row, places) in enumerate(zip(rows, figure.subplots(5, 2, sharex=True).T, strict=True)):
        draw_entropies(places[0], row)
        for axes, level in zip(places[1:], found, strict=True):
            draw_level(axes, level, row)
        places[-1].set_xlabel("token")
        if column == 0:
            figure.legend(*places[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path, "\n".join(in_words(level, rows) for level in found))


def draw_entropies(axes: Axes, row: int) -> None:
    n = int(TOKEN_MASK[row].sum())
    axes.bar(
        range(n),
        ENTROPY[row, :n],
        color=[HIGH_ENTROPY if group == 1 else LOW_ENTROPY for group in GROUPS[row, :n].tolist()],
        width=0.7,
    )
    axes.set(ylabel="entropy, nats", ylim=(0, 2.9))
    axes.set_title(f"A = {TOKEN_ADVANTAGES[row]:+.2f}: the entropies, in two groups", loc="left")


def draw_level(axes: Axes, level: Level, row: int) -> None:
    n = int(TOKEN_MASK[row].sum())
    low, high = -level.low[row, :n], level.high[row, :n]
    move, clipped = level.ratio[row, :n].double() - 1, level.clipped[row, :n]
    axes.bar(range(n), high - low, bottom=low, color="#dce6f2", width=1.0, label="clip range")
    axes.axhline(0, color=INK, linewidth=0.6)
    for group, colour, name in ((0, LOW_ENTROPY, "low entropy"), (1, HIGH_ENTROPY, "high entropy")):
        scatter(axes, move, ~clipped & (GROUPS[row, :n] == group), "o", colour, name)
    scatter(axes, move, clipped, "X", CLIPPED, "clipped: no gradient")
    axes.set_title(f"{level.title}: {int(clipped.sum())} of {n} clipped", loc="left")
    axes.set_yscale("symlog", linthresh=1e-5, linscale=0.5)
    axes.set(ylabel="ratio - 1", ylim=(-1, 1), yticks=[-1e-1, -1e-3, 0, 1e-3, 1e-1])
    axes.minorticks_off()


def scatter(axes: Axes, values: Tensor, wanted: Tensor, marker: str, colour: str, label: str) -> None:
    places = wanted.nonzero().flatten()
    axes.scatter(places, values[places], marker=marker, s=26, c=colour, label=label, zorder=3)


def in_words(level: Level, rows: tuple[int, int]) -> str:
    clipped = " ".join("".join("01"[mark] for mark in level.clipped[row].tolist()) for row in rows)
    return f"{level.title}, clipped: {clipped}"
