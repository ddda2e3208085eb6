"""Draws the pictures of README.md, docs/performance.md and docs/methods.md.

    python tools/pictures.py                  # all: after a benchmark run on a GPU, or after a change of a rule
    python tools/pictures.py ratios plan      # these
    python tools/pictures.py --check          # says which pictures show something else than today; writes nothing

The library itself chooses what is kept in a picture, and the times come from benchmarks/results. A picture's file also
holds a text that describes the picture. The check compares this text, because pixels change with matplotlib's releases;
so the check needs no matplotlib.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import d3s_kernels as d3s  # noqa: E402
from benchmarks.page import Run, heading, newest  # noqa: E402
from benchmarks.withdrawn import FULL_UPDATE  # noqa: E402
from d3s_kernels._rules.rules import ROLLOUT_RULES, TOKEN_RULES  # noqa: E402
from d3s_kernels.report.render import LEVELS, darkest_from, shade  # noqa: E402
from d3s_kernels.savings.model import from_config  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE = "#222222", "#bbbbbb"
PHASES = ("#1b7837", "#e08214", "#762a83")
INCHES = 10.0  # the width of a picture at 120 pixels an inch
MOST_BYTES = 120_000


class Picture(NamedTuple):
    words: str  # what it shows
    draw: Callable[[], Figure]


def new_figure(height: float) -> Figure:
    """A figure in the style of the pictures of docs/methods.md."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    sizes = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9)
    sizes |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8)
    no_lines = {"axes.spines.top": False, "axes.spines.right": False}
    mpl.rcParams.update({**sizes, **no_lines, "text.color": INK, "axes.labelcolor": INK})
    return Figure(figsize=(INCHES, height), layout="constrained", facecolor="white")


def save(picture: Picture, path: Path) -> None:
    import matplotlib as mpl
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawing, words = BytesIO(), PngInfo()
    with mpl.rc_context():
        mpl.rcdefaults()  # independent of the user's settings
        picture.draw().savefig(drawing, dpi=120)
    words.add_text("Description", picture.words)
    few_colours = Image.open(drawing).convert("RGB").quantize(200, dither=Image.Dither.NONE)  # a third of the file size
    few_colours.save(path, optimize=True, pnginfo=words)


def words_in(path: Path) -> str | None:
    """The text kept in a PNG file, read without a library for pictures; None without a file or a text."""
    content, place = path.read_bytes() if path.exists() else b"", 8  # after the signature
    while place < len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        key, _, text = content[place + 8 : place + 8 + length].partition(b"\0")
        if (kind, key) == (b"tEXt", b"Description"):
            return text.decode("latin-1")
        place += length + 12
    return None


# ---- the first picture of README.md: what is kept of a batch, and the time of an update with it ----------------------

# A unit is a pixel of a narrow phone, where the picture is WIDTH units wide.
WIDTH, MARGIN = 358, 12
ABOVE, HEADING = 8, 22  # the space above a heading, and the heading's height
SMALL, USUAL, LARGE = 9.5, 10.5, 14  # sizes of text
LETTER = 0.602 * USUAL  # the width of each letter of DejaVu Sans Mono
KEPT, SCORE, QUIET, GROUND, LINE = *PHASES[:2], "#59636e", "#f6f8fa", "#c4ccd4"
HIGH, STEP = 14, 17  # the height of a cell or a bar, and the distance from one to the next

# SmolLM2-135M's answers to four of the demo's problems, with the entropy of each token: drawn and sampled with the seed
# in the file (`draw` and `record` in examples/_demo). One group has no right answer, so none of its rollouts is kept.
ANSWERS = Path(__file__).with_name("overview_batch.json")
OF_GROUP, OF_TOKENS = 4, 0.1  # kept of a group's 8 rollouts on average, and of their tokens; as in the contest
QUESTION, OPENED = 1, 2  # the question and the answer whose tokens are shown
CONTENDERS = {
    "TRL, everything": "GRPOTrainer", "with our LM head": "GRPOTrainer with our LM head", "with D3S": "d3s_kernels",
}  # fmt: skip
# Of Qwen2.5-0.5B, as in its config.json.
QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
}  # fmt: skip


class Token(NamedTuple):
    text: str
    kept: bool
    shade: float  # from 0 to 1


class Overview(NamedTuple):
    questions: list[str]
    rewards: list[list[float]]  # of each answer to each question
    kept: list[list[bool]]
    tokens: list[Token]  # of the opened answer to the last question
    headings: list[tuple[str, str]]
    milliseconds: dict[str, float]
    note: str

    def words(self) -> str:
        rows = zip(self.questions, self.rewards, self.kept, strict=True)
        groups = [f"{question}: rewards {rewards}, kept {kept}" for question, rewards, kept in rows]
        tokens = [f"{token.text!r}{' kept' * token.kept} {token.shade:.1f}" for token in self.tokens]
        times = [f"{name}: {time:.0f} ms" for name, time in self.milliseconds.items()]
        return "\n".join([*map(": ".join, self.headings), *groups, ", ".join(tokens), *times, self.note])


def overview() -> Picture:
    shown = shown_of(json.loads(ANSWERS.read_text(encoding="utf-8")), newest()[0])
    return Picture(shown.words(), partial(draw_overview, shown))


def shown_of(batch: dict[str, Any], run: Run) -> Overview:
    groups = list(batch["groups"])
    groups.append(groups.pop(QUESTION))  # the last row, above its tokens
    answers = [answer for group in groups for answer in group["answers"]]
    rewards = torch.tensor([answer["reward"] for answer in answers]).view(len(groups), -1)
    advantages = d3s.group_advantages(rewards)
    kept = d3s.select_rollouts(advantages, OF_GROUP)

    rows = [torch.tensor(answers[row]["entropy"]) for row in kept.flatten().nonzero()]
    entropy, lengths = torch.cat(rows), torch.tensor([len(row) for row in rows])
    ends = lengths.cumsum(0)
    tokens = d3s.select_tokens(entropy, advantages[kept], OF_TOKENS, offsets=F.pad(ends, (1, 0)))
    scores = advantages[kept].abs().repeat_interleave(lengths) * entropy
    darkest = darkest_from(scores.tolist())

    row = int(kept[:-1].sum() + kept[-1, :OPENED].sum())  # the index of the opened answer among the kept answers
    place = slice(int(ends[row] - lengths[row]), int(ends[row]))
    shades = [shade(score, darkest) / (LEVELS - 1) for score in scores[place].tolist()]
    texts = groups[-1]["answers"][OPENED]["tokens"]

    contest = run["contests"][FULL_UPDATE]
    times = {name: 1e3 * contest[contender]["median_seconds"] for name, contender in CONTENDERS.items()}
    everything, _, ours = times.values()
    rollouts, length, _ = contest["d3s_kernels"]["size"].split(" x ")
    of_rollouts = part_of_rollouts(*(int(size.split()[0].replace(",", "")) for size in (rollouts, length)))
    return Overview(
        questions=[group["question"].split(".")[0] for group in groups],
        rewards=rewards.tolist(),
        kept=kept.tolist(),
        tokens=[Token(*each) for each in zip(texts, tokens.mask[place].tolist(), shades, strict=True)],
        headings=[
            ("Keep half of the rollouts", f"{int(kept.sum())} of {kept.numel()}"),
            ("and 10 % of their tokens", f"{int(tokens.count)} of {len(entropy)}"),
            ("Skip the rest", f"{everything / ours:.1f} times as fast"),
        ],
        milliseconds=times,
        note=f"Answers of {batch['model']}, shaded by |advantage| x entropy. Times of TRL's update on an {run['gpu']}, "
        f"Qwen2.5-0.5B's shapes: {rollouts} of {length}, all full. D3S: half, and 10 %. {of_rollouts:.0%} of the "
        "operations that it saves are the dropped rollouts'. Where all is kept, our LM head takes longer: it makes "
        "float32 logits, TRL's bfloat16.",
    )


def part_of_rollouts(rollouts: int, length: int) -> float:
    """The share of the saved operations that dropped rollouts save, as d3s savings counts; dropped tokens save the
    rest.
    """
    model, prompt = from_config(QWEN), 16
    body, head = sum(model.body(rollouts, prompt + length)), 2 * model.hidden * model.vocabulary * rollouts * length
    return (body + 4 * head) / 2 / (body + 4 * head - (body + (1 + 3 * OF_TOKENS) * head) / 2)


def draw_overview(shown: Overview) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH))
    axes.axis("off")
    place = 0.0
    for title, part in zip(shown.headings, (draw_answers, draw_text, draw_times), strict=True):
        place += ABOVE
        write(axes, MARGIN, place + 8, title[0], LARGE, weight="bold")
        write(axes, WIDTH - MARGIN, place + 8, title[1], LARGE, KEPT, weight="bold", ha="right")
        place = part(axes, place + HEADING, shown)
    for line in wrap(shown.note, 61):
        write(axes, MARGIN, place + 8, line, SMALL, QUIET)
        place += 12.5
    height = place + MARGIN - 3
    axes.set_ylim(height, 0)
    figure.set_size_inches(INCHES, INCHES * height / WIDTH)
    return figure


def draw_answers(axes: Axes, top: float, shown: Overview) -> float:
    """Draws a row for each question, with a cell for each answer. A cell shows whether the answer is right, and whether
    it is kept. As for the other parts, the result is where the next part can begin.
    """
    for question, rewards, kept in zip(shown.questions, shown.rewards, shown.kept, strict=True):
        write(axes, MARGIN, top + HIGH / 2, question, SMALL)
        for place, (reward, keep) in enumerate(zip(rewards, kept, strict=True)):
            left = left_of_cell(place, len(rewards))
            box(axes, left, top, HIGH, HIGH, KEPT if keep else "white", KEPT if keep else LINE)
            mark, colour = "✓" if reward else "✗", "white" if keep else PALE
            write(axes, left + HIGH / 2, top + HIGH / 2, mark, USUAL, colour, ha="center")
        top += STEP
    return top


def left_of_cell(place: int, cells: int) -> float:
    return WIDTH - MARGIN - HIGH - STEP * (cells - 1 - place)


def draw_text(axes: Axes, top: float, shown: Overview) -> float:
    """Draws one answer, with a line from the answer's cell. Tokens are shaded by score; kept tokens are bold and
    underlined.
    """
    left, lines, placed = MARGIN + 7, 1, []
    x = left
    for number, token in enumerate(shown.tokens):
        rest = "".join(after.text for after in shown.tokens[number + 1 :]).partition(" ")[0]  # the word's rest
        if token.text.startswith(" ") and x + len(token.text + rest) * LETTER > WIDTH - left:
            x, lines = left, lines + 1
            token = token._replace(text=token.text.lstrip() or " ")
        placed.append((x, top + STEP * (lines - 1) + 5, token))
        x += len(token.text) * LETTER
    centre = left_of_cell(OPENED, len(shown.kept[-1])) + HIGH / 2
    above = top - HEADING - ABOVE - STEP + HIGH
    axes.plot((centre, centre), (above, top), color=KEPT, linewidth=4)
    box(axes, MARGIN, top, WIDTH - 2 * MARGIN, STEP * lines + 6, GROUND, KEPT)
    for x, y, token in placed:
        width = len(token.text) * LETTER
        axes.add_patch(rectangle(x, y, width, 14, facecolor=SCORE, alpha=0.8 * token.shade, linewidth=0))
        write(axes, x, y + 7, token.text, USUAL, family="monospace", weight="bold" if token.kept else "normal")
        if token.kept:
            axes.plot((x, x + width), (y + 14.6,) * 2, color=KEPT, linewidth=4, solid_capstyle="butt")
    return top + STEP * lines + 6


def draw_times(axes: Axes, top: float, shown: Overview) -> float:
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


def rectangle(x: float, y: float, width: float, height: float, **more: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **more)


def box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, line: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=2.5"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=line, linewidth=2))


def write(axes: Axes, x: float, y: float, text: str, size: float, colour: str = INK, **more: Any) -> None:
    axes.text(x, y, text, fontsize=size * INCHES * 72 / WIDTH, color=colour, va="center_baseline", **more)


# ---- docs/performance.png: how many times as fast our code is as the code in use on a GPU today ----------------------

FORWARD, BACKWARD = "logprob_entropy forward", "logprob_entropy backward, both gradients"
HEAD = "linear_logprob_entropy forward + backward"
TRITON, PYTORCH, VERLS = "TRL's Triton kernel", "vectorised PyTorch", "verl's formula"
TOP, RATIO = "topk_mask of a batch, 10%", "importance_ratio with its gradient"

# Groups of rows. A row has its name in the picture, and the names of its contest and contender in the results. Rows
# without a result in the run are left out.
GROUPS = {
    "Log-probability and entropy": (
        ("TRL, Triton", FORWARD, TRITON),
        ("torch.compile", f"{FORWARD}, beside torch.compile", "torch.compile"),
        ("backward: TRL, Triton", BACKWARD, TRITON),
        ("backward: torch.compile", "logprob_entropy backward, beside torch.compile", "torch.compile"),
    ),
    "LM head, forward and backward": (
        ("Liger", f"{HEAD}, wide, bf16", "Liger's head"),
        ("Unsloth", f"{HEAD}, wide, bf16, beside Unsloth's", "Unsloth's head"),
        ("10 % of the tokens: TRL", f"{HEAD}, 10% of the tokens, narrow, bf16", "TRL's chunked head"),
        ("sampling mask: PyTorch", f"{HEAD}, with a sampling mask", "kept columns in PyTorch"),
    ),
    "The top 10 % of the tokens": (
        ("topk + scatter", TOP, "topk + scatter"),
        ("quantile, as TRL", TOP, "quantile"),
        ("2,048 of a row: FlashInfer", "topk_mask of ragged rows, 2,048 of each", "FlashInfer's indices"),
        ("their indices: nonzero", "compact, one position in ten", "nonzero"),
    ),
    "The rollouts of most variance": (
        ("groups: PyTorch", "max_variance_select, groups", PYTORCH),
        ("one pool: PyTorch", "max_variance_select, pool", PYTORCH),
    ),
    "Importance ratios and their gradient; ESPO": (
        ("of tokens: verl, eager", f"{RATIO}, token", VERLS),
        ("of sequences: verl, eager", f"{RATIO}, sequence", VERLS),
        ("groups: nanquantile", "entropy_groups", "nanquantile"),
        ("clip ranges: PyTorch", "adaptive_clip", "plain PyTorch"),
    ),
    "Update in TRL, 0.5B, full completions:\nhalf of the rollouts, 10 % of their tokens": (
        ("GRPOTrainer, all", FULL_UPDATE, "GRPOTrainer"),
    ),
}
SPEEDS = "Times as fast as what is run today"
ROW, BETWEEN = 0.34, 0.5  # the height of a row in inches; rows between groups


class Speed(NamedTuple):
    label: str
    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        return f"{self.value:.0f}x" if self.value >= 10 else f"{self.value:.2g}x"


def performance() -> Picture:
    run = newest()[0]
    below, groups = f"{heading(run)}\nmedians; dark bars are their 95 % intervals", speeds(run)
    lines = [f"{' '.join(group.split())}: {row.label}: {row} {row.interval}" for group, rows in groups for row in rows]
    return Picture("\n".join([SPEEDS, below, *lines]), partial(draw_performance, below, groups))


def speeds(run: Run) -> list[tuple[str, list[Speed]]]:
    groups = []
    for group, rows in GROUPS.items():
        found = [
            Speed(label, found["value"], found["interval"])
            for label, contest, peer in rows
            if (found := run["contests"].get(contest, {}).get(peer, {}).get("times_ours"))
        ]
        groups += [(group, found)] if found else []
    return groups


def draw_performance(below: str, groups: list[tuple[str, list[Speed]]]) -> Figure:
    from matplotlib.figure import Figure

    height = 1.8 + ROW * sum(len(group.splitlines()) + len(rows) + BETWEEN for group, rows in groups)
    figure = Figure(figsize=(7.5, height), facecolor="white")
    figure.text(0.02, 1 - 0.12 / height, SPEEDS, size=22, weight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.58 / height, below, size=14, color=INK, va="top")
    axes = figure.add_axes((0.41, 0.42 / height, 0.45, 1 - 1.6 / height), facecolor="white")
    values = [end for _, rows in groups for row in rows for end in (row.value, *(row.interval or ()))]
    least, most = min(0.9, *values), max(values)
    axes.set_xscale("log")
    axes.set_xlim(0.9 * least, 1.15 * most)
    ticks = [tick for tick in (0.01, 0.1, 1, 10, 100, 1000) if least < tick < most]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], size=15, color=INK)
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.axvline(1, color=INK, linewidth=2)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # The position of text is a share of the axes' width, and a row.
    text = {"transform": axes.get_yaxis_transform(), "size": 15, "color": INK}
    place = 0.0
    for group, rows in groups:
        axes.text(-0.86, place, group, va="top", backgroundcolor="white", weight="bold", ha="left", **text)
        place += len(group.splitlines())
        for row in rows:
            centre = place + 0.5
            axes.plot(row.value, centre, "o", color="#8fc9a4", markersize=13, clip_on=False)
            ends = row.interval or (row.value,) * 2
            axes.plot(ends, (centre, centre), color=KEPT, linewidth=4, solid_capstyle="butt")
            axes.text(-0.03, centre, row.label, va="center", weight="normal", ha="right", **text)
            axes.text(1.03, centre, str(row), va="center", weight="bold", ha="left", **text)
            place += 1
        place += BETWEEN
    axes.set_ylim(place, 0)
    return figure


# ---- docs/methods.md: the batch that its pictures show ---------------------------------------------------------------

KEEP, SHARE = 3, 0.2
REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],  # all equal: every advantage is 0
        [0.62, 0.10, 0.35, 0.90, 0.41, 0.05, 0.77, 0.48],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
    ]
)
LENGTHS = torch.tensor(
    [
        [212.0, 388.0, 305.0, 154.0, 471.0, 260.0, 347.0, 419.0],
        [98.0, 131.0, 87.0, 164.0, 120.0, 143.0, 109.0, 176.0],
        [240.0, 316.0, 189.0, 402.0, 275.0, 358.0, 221.0, 333.0],
        [512.0, 447.0, 498.0, 380.0, 465.0, 431.0, 509.0, 402.0],
    ]
)
ADVANTAGES = d3s.group_advantages(REWARDS)
# Tokens are shown only for every second rollout that D3S keeps.
TOKEN_ADVANTAGES = ADVANTAGES[d3s.select_rollouts(ADVANTAGES, KEEP)][1::2]
TOKEN_MASK = torch.arange(24) < torch.tensor([24, 17, 22, 24, 20, 13]).unsqueeze(-1)


def drawn(draw: Callable[[], float]) -> Tensor:
    """Random numbers, one for each token. Python draws them, since only torch's random numbers may change with a
    version.
    """
    return torch.tensor([[draw() for _ in row] for row in TOKEN_MASK])


_random = random.Random(7)
# Similar to a model's entropies in nats: near 0 for most tokens, large for a few.
ENTROPY = drawn(lambda: 2.8 * _random.random() ** 6 + 0.002) * TOKEN_MASK
ENTROPY_GROUPS = d3s.entropy_groups(ENTROPY, TOKEN_MASK)
# Log-probabilities before and after some updates, in which tokens with high entropy move more. Over the thousands of
# tokens of a real sequence these moves nearly cancel. These short sequences are shifted so that the moves in each
# entropy group have a small mean in the advantage's direction.
OLD = -ENTROPY - 0.01
_moves = drawn(lambda: _random.gauss(0, 1)) * (0.002 + 0.13 * ENTROPY)
for _row, _groups, _advantage in zip(_moves, ENTROPY_GROUPS, TOKEN_ADVANTAGES.tolist(), strict=True):
    for _group, _rest in enumerate((2e-5, 2.5e-3) if _advantage > 0 else (-1.2e-4, -7e-4)):
        _row[_groups == _group] += _rest - _row[_groups == _group].mean()
LOGPROB = OLD + _moves


class Panel(NamedTuple):
    """A grid in which a row is a group or a sequence, and a cell a rollout or a token; kept cells have a frame."""

    title: str
    values: Tensor  # the value of each cell, which sets its colour
    kept: Tensor | None  # kept cells; None if the panel shows no choice
    text: Sequence[Sequence[str]] | None = None  # the text of each cell
    shown: Tensor | None = None  # cells to draw; None for all
    rows: Sequence[str] = ()  # labels of the rows

    def words(self) -> str:
        """The text of each cell, or a dot, with an asterisk if the cell is kept."""
        text = self.text or [["."] * self.values.shape[1]] * self.values.shape[0]
        kept = self.values.new_zeros(self.values.shape) if self.kept is None else self.kept
        rows = (
            " ".join(cell + "*" * mark for cell, mark in zip(*row, strict=True))
            for row in zip(text, kept.int().tolist(), strict=True)
        )
        return f"{' '.join(self.title.split())}: {'; '.join(rows)}"


class Scale(NamedTuple):
    colours: str
    low: float
    high: float


def grids(panels: Sequence[Panel], columns: int, scale: Scale, height: float) -> Picture:
    return Picture("\n".join(panel.words() for panel in panels), partial(draw_grids, panels, columns, scale, height))


def draw_grids(panels: Sequence[Panel], columns: int, scale: Scale, height: float) -> Figure:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    figure, share = new_figure(height), Normalize(scale.low, scale.high, clip=True)
    for axes, panel in zip(figure.subplots(-(-len(panels) // columns), columns).flatten(), panels, strict=True):
        many, cells = panel.values.shape
        for row in range(many):
            for cell in range(cells):
                if panel.shown is None or panel.shown[row, cell]:
                    draw_cell(axes, panel, row, cell, colormaps[scale.colours](share(float(panel.values[row, cell]))))
        axes.set(xlim=(-0.1, cells + 0.1), ylim=(many + 0.1, -0.1), aspect="equal", xticks=[])
        axes.set_yticks([row + 0.5 for row in range(len(panel.rows))], panel.rows)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(panel.title, loc="left")
    return figure


def draw_cell(axes: Axes, panel: Panel, row: int, cell: int, colour: tuple[float, ...]) -> None:
    framed = panel.kept is not None and bool(panel.kept[row, cell])
    full = framed or panel.kept is None
    fill = {"facecolor": (*colour[:3], 1.0 if full else 0.3), "edgecolor": INK if framed else "#dddddd"}
    axes.add_patch(rectangle(cell + 0.06, row + 0.06, 0.88, 0.88, **fill, linewidth=1.6 if framed else 0.5))
    if panel.text is not None:
        red, green, blue, _ = colour
        dark = full and 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        ink = "white" if dark else INK if full else "#777777"
        axes.text(cell + 0.5, row + 0.52, panel.text[row][cell], ha="center", va="center", fontsize=7, color=ink)


# ---- docs/methods.md: rollouts and advantages ------------------------------------------------------------------------

NAMES_OF_ROLLOUTS = {
    ("max_variance", "batch"): "D3S",
    ("max_variance", "group"): "PODS, D3S-I",
    ("highest", "group"): "PODS max-reward",
    ("largest_abs", "batch"): "CPPO",
    ("largest_abs", "group"): "CPPO",
    ("percentile", "group"): "PODS",
    ("random", "group"): "PODS",
}
OF_ADVANTAGES = Scale("RdBu", -2.2, 2.2)


def rollouts() -> Picture:
    """A row of three panels for each rule: with scope "batch", with scope "group", and with another method."""
    spread = (ADVANTAGES != 0).any(-1, keepdim=True).expand_as(REWARDS)
    success = REWARDS.mean(-1, keepdim=True).expand_as(REWARDS)
    efficiency = REWARDS / LENGTHS
    beside = [
        numbers("the batch: its rewards", None, REWARDS),
        numbers("GFPO shortest: by length", best(-LENGTHS), LENGTHS, "{:.0f}"),
        numbers("GFPO efficiency: by 1000 R / length", best(efficiency), 1000 * efficiency, "{:.1f}"),
        numbers("DAPO: groups with some spread", spread, REWARDS),
        numbers("difficulty filter: mean R in 0.2 ... 0.8", (success >= 0.2) & (success <= 0.8), REWARDS),
    ]
    panels = []
    for rule, other in zip(ROLLOUT_RULES, beside, strict=True):
        panels += [rollouts_of(rule, "batch"), rollouts_of(rule, "group"), other]
    return grids(panels, 3, OF_ADVANTAGES, 9.2)


def advantages() -> Picture:
    kept = d3s.select_rollouts(REWARDS, KEEP, scope="group")
    of_kept = REWARDS.masked_fill(~kept, torch.nan)
    verdict = torch.ones_like(kept)
    verdict[0, 1] = verdict[2, 3] = False
    given = {
        "GRPO": (None, d3s.group_advantages(REWARDS)),
        'Dr. GRPO: scale="none"': (None, d3s.group_advantages(REWARDS, scale="none")),
        'Lite-PPO: scale="batch"': (None, d3s.group_advantages(REWARDS, scale="batch")),
        "PODS: of the kept ones": (kept, d3s.group_advantages(of_kept)),
        "GFPO: the same, ddof=0": (kept, d3s.group_advantages(of_kept, eps=0.0, ddof=0)),
        "ESPO: two without a verdict": (verdict, d3s.group_advantages(REWARDS.masked_fill(~verdict, torch.nan))),
    }
    panels = [numbers(title, shown, found, colour=found) for title, (shown, found) in given.items()]
    return grids(panels, 3, OF_ADVANTAGES, 3.6)


def rollouts_of(rule: Any, scope: Any) -> Panel:
    symbol, values = ("A", ADVANTAGES) if scope == "batch" or rule == "largest_abs" else ("R", REWARDS)
    generator = torch.Generator().manual_seed(0) if rule == "random" else None
    kept = d3s.select_rollouts(values, KEEP, rule=rule, scope=scope, generator=generator)
    by = "at random" if rule == "random" else f"by {symbol}"
    name = NAMES_OF_ROLLOUTS.get((rule, scope))
    return numbers(f'"{rule}", scope="{scope}"\n{f"{name}: {by}" if name else by}', kept, values)


def best(values: Tensor) -> Tensor:
    return d3s.select_rollouts(values, KEEP, rule="highest", scope="group")


def numbers(
    title: str, kept: Tensor | None, values: Tensor, form: str = "{:.2f}", colour: Tensor = ADVANTAGES
) -> Panel:
    text = [[without_zeros(form.format(number)) for number in row] for row in values.tolist()]
    return Panel(title, colour, kept, text, rows=[f"group {group}" for group in range(1, len(REWARDS) + 1)])


def without_zeros(number: str) -> str:
    return number.replace("-0.", "-.").removesuffix(".00").removesuffix(".0").removeprefix("0") or "0"


# ---- docs/methods.md: tokens -----------------------------------------------------------------------------------------

NAMES_OF_TOKENS = {
    ("advantage_entropy", "batch"): "D3S: by |A| H",
    ("advantage_entropy", "sequence"): "D3S in sequences: by |A| H",
    ("entropy", "batch"): "80/20: by H",
    ("entropy", "sequence"): "by H",
    ("advantage", "batch"): "by |A|",
    ("advantage", "sequence"): "by |A|: all tie",
    ("random", "batch"): "at random (colour: H)",
    ("random", "sequence"): "S-GRPO: at random (colour: H)",
    ("entropy_quantile", "batch"): "TRL: H at or above a quantile",
    ("prefix", "batch"): "NAT: before a random cut (half; colour: H)",
    ("prefix_advantage_entropy", "batch"): "before a random cut, by |A| H",
}


def tokens() -> Picture:
    assert {rule for rule, _ in NAMES_OF_TOKENS} == set(TOKEN_RULES)
    rows = [f"A = {advantage:+.2f}" for advantage in TOKEN_ADVANTAGES.tolist()]
    places = [(rule, scope) for rule in TOKEN_RULES for scope in ("batch", "sequence")]
    panels = [tokens_of(*place, rows) for place in places if place in NAMES_OF_TOKENS]
    panels.append(Panel("the tokens, by H: dark is high", ENTROPY, None, shown=TOKEN_MASK, rows=rows))
    return grids(panels, 2, Scale("YlOrRd", -0.3, 2.4), 10.0)


def tokens_of(rule: Any, scope: Any, rows: Sequence[str]) -> Panel:
    strength = TOKEN_ADVANTAGES.abs().unsqueeze(-1).expand_as(ENTROPY)
    by_both = strength * ENTROPY
    scores = {"advantage_entropy": by_both, "prefix_advantage_entropy": by_both, "advantage": strength}
    draws = rule == "random" or rule.startswith("prefix")
    found = d3s.select_tokens(
        ENTROPY, TOKEN_ADVANTAGES, 0.5 if rule == "prefix" else SHARE, rule=rule, scope=scope, mask=TOKEN_MASK,
        generator=torch.Generator().manual_seed(0) if draws else None,
    )  # fmt: skip
    counts = f"{int(found.count.sum())} of {int(TOKEN_MASK.sum())}"
    title = f'"{rule}", scope="{scope}"\n{NAMES_OF_TOKENS[rule, scope]}; {counts}'
    return Panel(title, scores.get(rule, ENTROPY), found.mask, shown=TOKEN_MASK, rows=rows)


# ---- docs/methods.md: D3S's budget over the course of training -------------------------------------------------------

SHAPES: tuple[Any, ...] = ("linear", "cosine", "exponential")


def schedule() -> Picture:
    halfway = [d3s.DownSamplingSchedule(shape=shape)(0.5).rollouts for shape in SHAPES]
    return Picture(f"rollouts halfway: {dict(zip(SHAPES, halfway, strict=True))}", draw_schedule)


def draw_schedule() -> Figure:
    from matplotlib.ticker import PercentFormatter

    figure, progress = new_figure(2.6), [step / 1000 for step in range(1001)]
    left, right = figure.subplots(1, 2)
    for shape, colour in zip(SHAPES, PHASES, strict=True):
        budgets = [d3s.DownSamplingSchedule(shape=shape)(done) for done in progress]
        label = f"{shape} (the paper's)" if shape == "linear" else shape
        left.plot(progress, [budget.rollouts for budget in budgets], color=colour, label=label)
        right.plot(progress, [budget.token_ratio for budget in budgets], color=colour, label=label)
    left.set(ylabel="rollouts of each group", ylim=(0, 34), yticks=[0, 8, 16, 24, 32])
    right.set(ylabel="share of their tokens", ylim=(0, 0.215), yticks=[0, 0.05, 0.1, 0.15, 0.2])
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (left, right):
        axes.set(xlabel="share of training that is done", xlim=(0, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(alpha=0.3)
    right.legend(loc="lower right", frameon=False)
    return figure


# ---- docs/methods.md: ratios of tokens, sequences and entropy groups, and which tokens are clipped -------------------


class Level(NamedTuple):
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


def ratios() -> Picture:
    alike = torch.ones_like(ENTROPY)
    epsilon = d3s.adaptive_clip(ENTROPY, ENTROPY_GROUPS, TOKEN_MASK, vocab_size=151_936)

    def ratio(level: Any, **options: Any) -> Tensor:
        return d3s.importance_ratio(LOGPROB, OLD, TOKEN_MASK, level=level, **options)

    of_groups = ratio("entropy_group", groups=ENTROPY_GROUPS)
    literal = ratio("entropy_group", groups=ENTROPY_GROUPS, denominator="old")
    levels = [
        Level('GRPO: level="token", clip 0.2', ratio("token"), 0.2 * alike, 0.2 * alike),
        Level('GSPO: level="sequence", clip 3e-4, 4e-4', ratio("sequence"), 3e-4 * alike, 4e-4 * alike),
        Level('ESPO: level="entropy_group", adaptive_clip', of_groups, epsilon, epsilon),
        Level('ESPO as printed: denominator="old"', literal, epsilon, epsilon),
    ]
    rows = (int((TOKEN_ADVANTAGES > 0).nonzero()[0]), int((TOKEN_ADVANTAGES < 0).nonzero()[0]))
    marks = [" ".join("".join("01"[mark] for mark in level.clipped[row].tolist()) for row in rows) for level in levels]
    words = [f"{level.title}, clipped: {found}" for level, found in zip(levels, marks, strict=True)]
    return Picture("\n".join(words), partial(draw_ratios, levels, rows))


def draw_ratios(levels: list[Level], rows: tuple[int, int]) -> Figure:
    figure = new_figure(9.0)
    for column, (row, places) in enumerate(zip(rows, figure.subplots(5, 2, sharex=True).T, strict=True)):
        n = int(TOKEN_MASK[row].sum())
        colours = [PHASES[int(group == 1)] for group in ENTROPY_GROUPS[row, :n].tolist()]
        places[0].bar(range(n), ENTROPY[row, :n], color=colours, width=0.7)
        places[0].set(ylabel="entropy, nats", ylim=(0, 2.9))
        places[0].set_title(f"A = {TOKEN_ADVANTAGES[row]:+.2f}: the entropies, in two groups", loc="left")
        for axes, level in zip(places[1:], levels, strict=True):
            draw_level(axes, level, row, n)
        places[-1].set_xlabel("token")
        if column == 0:
            figure.legend(*places[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_level(axes: Axes, level: Level, row: int, n: int) -> None:
    low, high = -level.low[row, :n], level.high[row, :n]
    move, clipped = level.ratio[row, :n].double() - 1, level.clipped[row, :n]
    axes.bar(range(n), high - low, bottom=low, color="#dce6f2", width=1.0, label="clip range")
    axes.axhline(0, color=INK, linewidth=0.6)
    group = ENTROPY_GROUPS[row, :n]
    for wanted, marker, colour, label in (
        (~clipped & (group == 0), "o", PHASES[0], "low entropy"),
        (~clipped & (group == 1), "o", PHASES[1], "high entropy"),
        (clipped, "X", "#c51b20", "clipped: no gradient"),
    ):
        places = wanted.nonzero().flatten()
        axes.scatter(places, move[places], marker=marker, s=26, c=colour, label=label, zorder=3)
    axes.set_title(f"{level.title}: {int(clipped.sum())} of {n} clipped", loc="left")
    axes.set_yscale("symlog", linthresh=1e-5, linscale=0.5)
    axes.set(ylabel="ratio - 1", ylim=(-1, 1), yticks=[-1e-1, -1e-3, 0, 1e-3, 1e-1])
    axes.minorticks_off()


# ---- docs/methods.md: sGPO's plan: group sizes by success rate, and the queries that each phase serves ---------------

SAMPLES = 8
# The successes of each query, hard queries first, similar to a profile of a small model.
QUERIES = torch.tensor([0] * 10 + [1] * 6 + [2] * 5 + [3] * 4 + [4] * 4 + [5] * 3 + [6] * 3 + [7] * 2 + [8] * 3)


def plan() -> Picture:
    found = d3s.plan_rollouts(QUERIES, SAMPLES)
    served = [f"phase {phase}: {found.queries(phase).tolist()}" for phase in range(len(found.phase_sizes))]
    return Picture("\n".join([f"sizes: {found.group_size.tolist()}", *served]), partial(draw_plan, found))


def draw_plan(found: d3s.RolloutPlan) -> Figure:
    figure = new_figure(5.2)
    sizes, phases = figure.subplots(2, 1, height_ratios=(3, 1.5))
    draw_sizes(sizes)
    draw_phases(phases, found)
    return figure


def draw_sizes(axes: Axes) -> None:
    many = 2000  # samples for the smooth lines
    fine = torch.arange(1, many + 1)
    for rule, style in (("inverse_success_rate", ":"), ("buckets", "-")):
        found = d3s.plan_rollouts(fine, many, rule=rule).group_size.tolist()
        shown = [(rate, size) for rate, size in zip((fine / many).tolist(), found, strict=True) if size > 0]
        axes.plot(*zip(*shown, strict=True), style, color=INK, linewidth=1.2, label=f'rule="{rule}"')
    coarse = d3s.plan_rollouts(torch.arange(SAMPLES + 1), SAMPLES)
    for successes, (size, phase) in enumerate(zip(coarse.group_size.tolist(), coarse.phase.tolist(), strict=True)):
        if phase >= 0:
            axes.plot(successes / SAMPLES, size, "o", color=PHASES[phase], markersize=9)
            beside = (-24, -14) if size > 2 else (0, -17)  # does not overlap the lines
            place = successes / SAMPLES, size
            axes.annotate(f"{successes} of {SAMPLES}", place, beside, textcoords="offset points", ha="center")
    axes.axvspan(0.75, 1.02, color=PALE, alpha=0.35, linewidth=0)
    axes.text(0.885, 5, "trivial:\nnot trained on", ha="center", va="center")
    axes.axvspan(-0.035, 0, color=PALE, alpha=0.35, linewidth=0)
    axes.text(0.012, 1.05, "p = 0: a random 10 % is kept, for every phase", va="bottom")
    axes.set(xlabel="p, successes of the initial policy / samples", ylabel="rollouts of a group")
    axes.set(xlim=(-0.035, 1.02), ylim=(0.8, 9), yticks=[2, 4, 6, 8])
    axes.legend(loc="upper right", bbox_to_anchor=(0.72, 1), frameon=False)


def draw_phases(axes: Axes, found: d3s.RolloutPlan) -> None:
    """Draws a row for each phase, with a coloured cell for each query that it serves."""
    many = len(found.phase_sizes)
    for phase, size in enumerate(found.phase_sizes):
        served = found.queries(phase).tolist()
        for query in range(len(QUERIES)):
            colour = PHASES[phase] if query in served else "#f2f2f2"
            axes.add_patch(rectangle(query + 0.06, phase + 0.08, 0.88, 0.84, facecolor=colour, linewidth=0))
            if query in served:
                axes.text(query + 0.5, phase + 0.52, size, ha="center", va="center", color="white", fontsize=7)
    axes.set(xlim=(0, len(QUERIES)), ylim=(many, 0))
    axes.set_yticks([phase + 0.5 for phase in range(many)])
    axes.set_yticklabels([f"phase {phase}" for phase in range(many)])
    axes.set_xticks([query + 0.5 for query in range(len(QUERIES))], QUERIES.tolist())
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = f"queries, by their successes of {SAMPLES}; a cell is a query that the phase serves, with its rollouts"
    axes.set_xlabel(label)


# ---- all of them -----------------------------------------------------------------------------------------------------

IN_DOCS = (overview, performance)
OF_METHODS = (rollouts, advantages, tokens, schedule, ratios, plan)
PICTURES = {ROOT / "docs" / f"{make.__name__}.png": make for make in IN_DOCS}
PICTURES |= {ROOT / "docs" / "methods" / f"{make.__name__}.png": make for make in OF_METHODS}


def outdated() -> list[str]:
    """The files that are too large, or that do not match the library's present choices and the present results."""
    return [
        str(path.relative_to(ROOT))
        for path, make in PICTURES.items()
        if words_in(path) != make().words or path.stat().st_size > MOST_BYTES
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stems = [path.stem for path in PICTURES]
    parser.add_argument("names", nargs="*", choices=[[], *stems], metavar="NAME")  # [] is what is given for none
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is another")
    given = parser.parse_args()
    if given.check:
        wrong = outdated()
        for name in wrong:
            print(f"{name} is not what the library and the results say")
        return int(bool(wrong))
    for path, make in PICTURES.items():
        if not given.names or path.stem in given.names:
            save(make(), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
