"""The picture of docs/performance.md: how many times as fast our code is as the code in use on a GPU today."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.withdrawn import FULL_UPDATE

FORWARD, BACKWARD = "logprob_entropy forward", "logprob_entropy backward, both gradients"
HEAD = "linear_logprob_entropy forward + backward"
FEW = f"{HEAD}, 10% of the tokens, narrow, bf16"
TOKENS, ROLLOUTS = "topk_mask of a batch, 10%", "max_variance_select, groups"

# Groups of rows. A row has its name in the picture, and the names of its contest and contender in the results. Rows
# without a result in the run are left out.
SHOWN: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Log-probability and entropy",
        (
            ("TRL, Triton", FORWARD, "TRL's Triton kernel"),
            ("torch.compile", f"{FORWARD}, beside torch.compile", "torch.compile"),
            ("backward: TRL, Triton", BACKWARD, "TRL's Triton kernel"),
            ("backward: torch.compile", "logprob_entropy backward, beside torch.compile", "torch.compile"),
        ),
    ),
    (
        "LM head, forward and backward",
        (
            ("Liger", f"{HEAD}, wide, bf16", "Liger's head"),
            ("Unsloth", f"{HEAD}, wide, bf16, beside Unsloth's", "Unsloth's head"),
            ("10 % of the tokens: TRL", FEW, "TRL's chunked head"),
            ("sampling mask: PyTorch", f"{HEAD}, with a sampling mask", "kept columns in PyTorch"),
        ),
    ),
    (
        "The top 10 % of the tokens",
        (
            ("topk + scatter", TOKENS, "topk + scatter"),
            ("quantile, as TRL", TOKENS, "quantile"),
            ("2,048 of a row: FlashInfer", "topk_mask of ragged rows, 2,048 of each", "FlashInfer's indices"),
            ("their indices: nonzero", "compact, one position in ten", "nonzero"),
        ),
    ),
    (
        "The rollouts of most variance",
        (
            ("groups: PyTorch", ROLLOUTS, "vectorised PyTorch"),
            ("one pool: PyTorch", "max_variance_select, pool", "vectorised PyTorch"),
        ),
    ),
    (
        "Importance ratios and their gradient; ESPO",
        (
            ("of tokens: verl, eager", "importance_ratio with its gradient, token", "verl's formula"),
            ("of sequences: verl, eager", "importance_ratio with its gradient, sequence", "verl's formula"),
            ("groups: nanquantile", "entropy_groups", "nanquantile"),
            ("clip ranges: PyTorch", "adaptive_clip", "plain PyTorch"),
        ),
    ),
    (
        "Update in TRL, 0.5B, full completions:\nhalf of the rollouts, 10 % of their tokens",
        (("GRPOTrainer, all", FULL_UPDATE, "GRPOTrainer"),),
    ),
)
TITLE = "Times as fast as what is run today"
INK, PALE, OURS = "#222222", "#8fc9a4", "#1b7837"
WIDTH = 7.5  # inches: 900 pixels
ROW, BETWEEN = 0.34, 0.5
MOST_BYTES = 120_000


class Row(NamedTuple):
    label: str
    value: float
    interval: tuple[float, float] | None


Groups = list[tuple[str, list[Row]]]


def groups_of(run: dict[str, Any]) -> Groups:
    contests = run["contests"]
    groups = []
    for group, rows in SHOWN:
        found = [
            Row(label, found["value"], found["interval"])
            for label, contest, peer in rows
            if (found := contests.get(contest, {}).get(peer, {}).get("times_ours"))
        ]
        groups += [(group, found)] if found else []
    return groups


def words(heading: str, run: dict[str, Any]) -> str:
    """What the picture shows, as text. It is stored in the picture's file: pixels change with matplotlib's releases."""
    lines = [TITLE, heading]
    for group, rows in groups_of(run):
        lines += [f"{' '.join(group.split())}: {row.label}: {times(row.value)} {row.interval}" for row in rows]
    return "\n".join(lines)


def times(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2g}x"


def words_in(picture: Path) -> str | None:
    """The text kept in a PNG file, read without a library for pictures; None without a file or a text."""
    if not picture.exists():
        return None
    content, place = picture.read_bytes(), 8  # after the signature
    while place < len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        key, _, text = content[place + 8 : place + 8 + length].partition(b"\0")
        if (kind, key) == (b"tEXt", b"Description"):
            return text.decode("latin-1")
        place += length + 12
    return None


def draw(path: Path, heading: str, run: dict[str, Any]) -> None:
    from matplotlib.figure import Figure  # the check of the picture needs neither of these imports
    from methods.style import save

    groups = groups_of(run)
    height = 1.8 + ROW * sum(len(group.splitlines()) + len(rows) + BETWEEN for group, rows in groups)
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    figure.text(0.02, 1 - 0.12 / height, TITLE, size=22, weight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.58 / height, heading, size=14, color=INK, va="top")
    axes = figure.add_axes((0.41, 0.42 / height, 0.45, 1 - 1.6 / height), facecolor="white")
    style(axes, groups)
    place = 0.0
    for group, rows in groups:
        axes.text(-0.86, place, group, va="top", backgroundcolor="white", **beside(axes, "bold", "left"))
        place += len(group.splitlines())
        for row in rows:
            draw_row(axes, place + 0.5, row)
            place += 1
        place += BETWEEN
    axes.set_ylim(place, 0)
    save(figure, path, words(heading, run))


def style(axes: Any, groups: Groups) -> None:
    values = [end for _, rows in groups for row in rows for end in (row.value, *(row.interval or ()))]
    axes.set_xscale("log")
    axes.set_xlim(0.9 * min(0.9, *values), 1.15 * max(values))
    ticks = [tick for tick in (0.01, 0.1, 1, 10, 100, 1000) if min(0.9, *values) < tick < max(values)]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], size=15, color=INK)
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.axvline(1, color=INK, linewidth=2)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_row(axes: Any, centre: float, row: Row) -> None:
    axes.plot(row.value, centre, "o", color=PALE, markersize=13, clip_on=False)
    axes.plot(row.interval or (row.value,) * 2, (centre, centre), color=OURS, linewidth=4, solid_capstyle="butt")
    axes.text(-0.03, centre, row.label, va="center", **beside(axes, "normal", "right"))
    axes.text(1.03, centre, times(row.value), va="center", **beside(axes, "bold", "left"))


def beside(axes: Any, weight: str, align: str) -> dict[str, Any]:
    """Options for text; its position is given as a share of the axes' width, and as a row."""
    return {"transform": axes.get_yaxis_transform(), "size": 15, "weight": weight, "ha": align, "color": INK}
