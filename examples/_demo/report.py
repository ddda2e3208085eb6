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
    difference: float | None  # of its gradient from plain PyTorch's, relative; None where that was not computed


def introduce(console: Console, folder: Path | None, prompts: int, group: int, threads: str) -> None:
    """Says what the demo does, with which model, and on how many threads."""
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
            "names none. It is so small that there is little to save; make demo gets a real one, SmolLM2, if it can."
        )
    else:
        console.print(f"The model: {folder.name}, on {device}.")
    console.print(f"{threads}\n")


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


def table(recorded: Recorded, generation: float, everything: Update, our_head: Update, points: list[Point]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), width=WIDTH)
    shown.add_column("\none training step", no_wrap=True)
    for head in ("GRPO\n", "GRPO\nour LM head", *(f"D3S\n{point.when}" for point in points)):
        shown.add_column(head, justify="right", no_wrap=True)
    updates = [everything, our_head, *(point.update for point in points)]

    def row(name: str, cell: Callable[[Update], str], last: bool = False) -> None:
        shown.add_row(name, *map(cell, updates), end_section=last)

    def seconds(stage: str) -> Callable[[Update], str]:
        return lambda update: in_seconds(update.costs.seconds[stage])

    tokens = sum(map(len, recorded.completions))
    differences = {id(p.update): f"{p.difference:.0e}" for p in points if p.difference is not None}
    row("answers trained on", lambda update: str(len(update.batch["completion_ids"])))
    row("tokens with a gradient", lambda update: str(kept(update) if is_d3s(update) else tokens))
    row("  mean entropy, nats", lambda update: logged(update, "d3s/entropy_kept" if is_d3s(update) else "entropy"))
    row("  others in these answers", lambda update: logged(update, "d3s/entropy_dropped"), last=True)
    row("seconds to generate", lambda _: in_seconds(generation))
    row("  to score and to choose", seconds(SCORING))
    row("  to update", seconds(UPDATE))
    row("  memory it adds, GB", memory, last=True)
    row("gradient off PyTorch's by", lambda update: differences.get(id(update), "-"))
    return shown


def is_d3s(update: Update) -> bool:
    return "d3s_kept" in update.batch


def kept(update: Update) -> int:
    return int(update.batch["d3s_kept"].sum())


def logged(update: Update, name: str) -> str:
    return f"{update.logged[name]:.2f}" if name in update.logged else "-"


def in_seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def memory(update: Update) -> str:
    peak = update.costs.peak[UPDATE]
    return "?" if peak is None else f"{peak / 1e9:.2f}"


def after_generation(update: Update) -> float:
    return update.costs.seconds[SCORING] + update.costs.seconds[UPDATE]


def conclude(console: Console, generation: float, everything: Update, our_head: Update, points: list[Point]) -> None:
    """What was saved, and what was not."""
    times = [after_generation(update) for update in (everything, our_head, *(point.update for point in points))]
    grpo, with_head, start, middle, end = map(in_seconds, times)
    whole = [in_seconds(generation + time) for time in times]
    same = all(point.difference < DIFFERENT for point in points if point.difference is not None)
    verdict = "differs from plain PyTorch's by rounding alone" if same else "[bold red]is not that of plain PyTorch[/]"
    console.print(
        f"[bold]Saved[/]: once the answers are there, GRPO's step takes {grpo} s ({with_head} s with our LM head and "
        f"nothing else), and D3S's {start} s at the start of training, {middle} s in the middle and {end} s at the "
        f"end; the gradient through the kept tokens, at the start and in the middle, {verdict}.\n"
        f"[bold]Not saved[/]: the {in_seconds(generation)} s of generation, because answers have to exist before some "
        f"are chosen, so whole steps take {whole[0]} s with GRPO and {', '.join(whole[2:-1])} and {whole[-1]} s with "
        "D3S; and one step cannot show whether a model learns as well from fewer answers and tokens."
    )
    if not same:
        raise SystemExit(1)
