"""What the demo prints, in 80 columns. Every number in it was measured in this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
        "wrong one of 0. TRL's [bold]GRPO[/] updates the model on every token of every answer. [bold]D3S[/] drops the "
        "answers whose rewards say least, and of the others it trains on the tokens at which the model was least sure: "
        "on few at the start of training, on more at its end. Both get the same answers and the same weights.\n"
    )
    if folder is None:
        console.print(
            "[bold]The model is a stand-in[/], made and trained in the next seconds, because --model names none. It is "
            "so small that there is little to save; make demo gets a real one, SmolLM2, if it can.\n"
        )
    else:
        console.print(f"The model: {folder.name}.\n")


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
    row("  mean entropy, in nats", logged("d3s/entropy_kept"), grpo=logged("entropy")(everything))
    row("  and of tokens left out", logged("d3s/entropy_dropped"), grpo="-", last=True)
    row("seconds to generate", lambda _: in_seconds(generation))
    row("  to score and to choose", seconds(SCORING))
    row("  to update", seconds(UPDATE))
    row("memory of the update, GB", memory, last=True)
    difference = {id(point.update): f"{point.difference:.0e}" for point in points}
    row("error of the gradient", lambda update: difference[id(update)], grpo="-")
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
    *others, last = [f"{in_seconds(after_generation(point.update))} s {point.when}" for point in points]
    grpo = in_seconds(after_generation(everything))
    same = all(point.difference < DIFFERENT for point in points)
    verdict = "differs from plain PyTorch's by rounding alone" if same else "[bold red]is not that of plain PyTorch[/]"
    console.print(
        f"[bold]Saved[/]: once the answers are there, GRPO's step took {grpo} s, and D3S's {', '.join(others)} and "
        f"{last} of training; its gradient through the kept tokens {verdict}.\n"
        f"[bold]Not saved[/]: the {in_seconds(generation)} s of generation, because answers have to exist before some "
        "of them are chosen; and one step cannot show whether a model learns as well from fewer answers and tokens."
    )
    if not same:
        raise SystemExit(1)
