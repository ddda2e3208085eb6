"""What the demo prints, in 80 columns. Every number in it was measured in this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from .rollouts import Recorded
from .update import SCORING, UPDATE, Update

WIDTH = 80
DIFFERENT = 1e-3  # a larger relative difference of two float32 gradients is no rounding


@dataclass(frozen=True)
class Point:
    """An update at one point of D3S's schedule."""

    when: str
    update: Update
    difference: float  # of its gradient from plain PyTorch's, relative


def introduce(console: Console, folder: Path | None, prompts: int, group: int) -> None:
    """Says what the demo does, and with which model."""
    console.print(
        f"A language model answers {prompts} word problems {group} times each. A right answer has a reward of 1, a "
        "wrong one of 0. TRL's [bold]GRPO[/] updates the model on every token of every answer. [bold]D3S[/] keeps the "
        "answers whose advantages (reward against the mean of their question) differ most, and in them the tokens with "
        "the highest |advantage| x entropy, where the model was unsure: few at the start of training, more at its "
        "end. Below is one step at each of these points, on the same answers and from the same weights.\n"
    )
    device = "a GPU" if torch.cuda.is_available() else "the CPU"
    if folder is None:
        console.print(
            f"[bold]The model is a stand-in[/], on {device}, made and trained in the next seconds, because --model "
            "names none. It is so small that there is little to save; make demo gets a real one, SmolLM2, if it can.\n"
        )
    else:
        console.print(f"The model: {folder.name}, on {device}.\n")


def answers(console: Console, recorded: Recorded) -> None:
    """A right and a wrong answer to the same question, and how many of all are right."""
    share = recorded.rewards.mean(dim=1)
    place = int((share - 0.5).abs().argmin())
    console.print(f"[bold]{recorded.problems[place].question}[/]")
    texts = recorded.texts[place * recorded.group : (place + 1) * recorded.group]
    for verdict, reward in (("right", 1.0), ("wrong", 0.0)):
        for row in (recorded.rewards[place] == reward).nonzero()[:1, 0].tolist():
            console.print(f"  {verdict}: {' '.join(texts[row].split())}", markup=False)
    mixed = int(((share > 0) & (share < 1)).sum())
    console.print(
        f"Of all {len(recorded.texts)} answers {recorded.rewards.mean():.0%} are right; {mixed} of {len(share)} "
        "questions have right and wrong ones."
    )


def table(recorded: Recorded, generation: float, everything: Update, points: list[Point]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), width=WIDTH)
    shown.add_column("\none training step", no_wrap=True)
    shown.add_column("GRPO\n", justify="right", no_wrap=True)
    for point in points:
        shown.add_column(f"D3S\n{point.when}", justify="right", no_wrap=True)
    updates = [point.update for point in points]

    def row(name: str, cell: Callable[[Update], str], grpo: str | None = None, last: bool = False) -> None:
        shown.add_row(name, cell(everything) if grpo is None else grpo, *map(cell, updates), end_section=last)

    def seconds(stage: str) -> Callable[[Update], str]:
        return lambda update: in_seconds(update.costs.seconds[stage])

    row("answers trained on", lambda update: str(len(update.batch["completion_ids"])))
    row("tokens with a gradient", lambda update: str(kept(update)), grpo=str(sum(map(len, recorded.completions))))
    row("  mean entropy, nats", logged("d3s/entropy_kept"), grpo=logged("entropy")(everything))
    row("  others in these answers", logged("d3s/entropy_dropped"), grpo="-", last=True)
    row("seconds to generate", lambda _: in_seconds(generation))
    row("  to score and to choose", seconds(SCORING))
    row("  to update", seconds(UPDATE))
    row("  memory it adds, GB", memory, last=True)
    difference = {id(point.update): f"{point.difference:.0e}" for point in points}
    row("gradient off PyTorch's by", lambda update: difference[id(update)], grpo="-")
    return shown


def kept(update: Update) -> int:
    return int(update.batch["d3s_kept"].sum())


def logged(name: str) -> Callable[[Update], str]:
    return lambda update: f"{update.logged[name]:.2f}" if name in update.logged else "-"


def in_seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def memory(update: Update) -> str:
    peak = update.costs.peak[UPDATE]
    return "?" if peak is None else f"{peak / 1e9:.2f}"


def after_generation(update: Update) -> float:
    return update.costs.seconds[SCORING] + update.costs.seconds[UPDATE]


def conclude(console: Console, generation: float, everything: Update, points: list[Point]) -> None:
    """What was saved, and what was not."""
    times = [after_generation(update) for update in (everything, *(point.update for point in points))]
    *others, last = [f"{in_seconds(time)} s {point.when}" for time, point in zip(times[1:], points, strict=True)]
    grpo, *steps = [in_seconds(generation + time) for time in times]
    same = all(point.difference < DIFFERENT for point in points)
    verdict = "differs from plain PyTorch's by rounding alone" if same else "[bold red]is not that of plain PyTorch[/]"
    console.print(
        f"[bold]Saved[/]: once the answers are there, GRPO's step took {in_seconds(times[0])} s, and D3S's "
        f"{', '.join(others)} and {last} of training; its gradient through the kept tokens {verdict}.\n"
        f"[bold]Not saved[/]: the {in_seconds(generation)} s of generation, because answers have to exist before some "
        f"are chosen, so whole steps took {grpo} s and {', '.join(steps[:-1])} and {steps[-1]} s; and one step cannot "
        "show whether a model learns as well from fewer answers and tokens."
    )
    if not same:
        raise SystemExit(1)
