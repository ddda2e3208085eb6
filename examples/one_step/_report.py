"""The text that `make step` prints. Every number in it was measured in this run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from _step import LM_HEAD, SELECTION, Step
from _task import VOCABULARY, Rollouts, Task
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from torch import Tensor
from transformers import Qwen2ForCausalLM

import d3s_kernels as d3s

if TYPE_CHECKING:
    from _run import Point

LEAST_SPREAD = 1.0  # nats between the entropy's 5th and 95th percentile
TOLERANCE = 5e-4  # relative; a float32 log_softmax over this vocabulary differs by up to this much from float64


def heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def say(console: Console, text: str) -> None:
    console.print(Padding(text, (0, 0, 0, 3), expand=False))


def model(console: Console, model: Qwen2ForCausalLM, losses: list[float]) -> None:
    heading(console, "1. A model that is sure of some tokens and unsure of others")
    say(
        console,
        f"A Qwen2 of width {model.config.hidden_size} with the whole vocabulary of {VOCABULARY:,} was shown "
        f"{len(losses)} batches of sums, worked out or guessed: loss {losses[0]:.1f} -> {losses[-1]:.2f}.",
    )


def rollouts(console: Console, task: Task, batch: Rollouts, entropy: Tensor) -> None:
    """Describes the sampled batch; ends the run if all entropies or all rewards are too similar for a selection."""
    rewards = batch.grouped(batch.rewards)
    groups, group_size = rewards.shape
    heading(console, "2. Its rollouts")
    say(
        console,
        f"{group_size} answers to each of {groups} prompts: {int(batch.mask.sum()):,} tokens, {rewards.mean():.0%} of "
        "the answers right. For example",
    )
    for verdict, found in (("[green]right[/]", batch.rewards == 1), ("[red]wrong[/]", batch.rewards == 0)):
        for i in found.nonzero()[:1, 0].tolist():
            say(console, f"  {verdict}: {question(batch, i)} [dim]{' '.join(task.read(batch.labels[i])[:-1])}[/]")

    low, middle, high = entropy[batch.mask].quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    mixed = int((rewards.amin(1) < rewards.amax(1)).sum())
    say(
        console,
        f"Entropy of the next token: p5 {low:.3f}, median {middle:.3f}, p95 {high:.2f} nats (of at most "
        f"{math.log(VOCABULARY):.1f}).",
    )
    say(console, f"Groups with mixed rewards (right and wrong answers): {mixed} of {groups}, {mixed / groups:.0%}.")
    if high - low < LEAST_SPREAD:
        raise SystemExit(f"FAILED: the entropy's p5 and p95 are {high - low:.2f} nats apart, under {LEAST_SPREAD}.")
    if mixed == 0:
        raise SystemExit("FAILED: no group has both right and wrong answers, so every advantage is 0.")


def question(batch: Rollouts, rollout: int) -> str:
    a, b = batch.questions[rollout * len(batch.questions) // len(batch)]
    return f"{a} + {b} ="


def schedule(
    console: Console, paper: d3s.DownSamplingSchedule, paper_group: int, ours: d3s.DownSamplingSchedule, group: int
) -> None:
    (first, first_ratio), (last, last_ratio) = ours.start, ours.end
    heading(console, "3. D3S's schedule")
    say(
        console,
        f"From {first} rollouts per prompt and {first_ratio:.0%} of their tokens at the start of training (progress 0) "
        f"to {last} and {last_ratio:.0%} at its end (progress 1): the paper's {paper.start.rollouts} to "
        f"{paper.end.rollouts} of {paper_group}, scaled to groups of {group}.",
    )


def costs(console: Console, batch: Rollouts, points: list[Point], everything: Step) -> None:
    """Prints the table with one step in each row, and a summary."""
    heading(console, "4. One training step: what it keeps, and what that costs")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nstep", no_wrap=True)
    for name in ("rollouts", "tokens", "time of\nselection", "\nLM head", "memory of\nselection", "\nLM head"):
        table.add_column(name if "\n" in name else f"{name}\nkept", justify="right", no_wrap=True)
    table.add_row("[bold]everything kept[/]")
    table.add_row("  plain PyTorch", *_cells(batch, everything), end_section=True)
    for point in points:
        table.add_row(f"[bold]progress {point.progress:g}[/]")
        table.add_row("  plain PyTorch", *_cells(batch, point.plain))
        table.add_row("  [bold]d3s_kernels[/]", *_cells(batch, point.ours), end_section=True)
    console.print(table)

    say(
        console,
        "[dim]Tokens kept: of those in the rollouts kept. LM head: forward and backward. Selection: of rollouts, then "
        "of tokens; for the entropy plain PyTorch goes over the logits again, while d3s_kernels' LM head gives it "
        "along with the log-probability. Memory: the peak, beyond what was in use before.[/]",
    )
    for point in points:
        same_time, same_memory = _ratios(point.plain, point.ours)
        all_time, all_memory = _ratios(everything, point.ours)
        say(
            console,
            f"At progress {point.progress:g} plain PyTorch takes [bold]{same_time:.1f}x[/] the time and "
            f"[bold]{same_memory:.1f}x[/] the memory of d3s_kernels; keeping everything, {all_time:.1f}x and "
            f"{all_memory:.1f}x.",
        )


def _cells(batch: Rollouts, step: Step) -> list[str]:
    trained, available = int(step.tokens.sum()), int(batch.mask[step.rollouts].sum())
    seconds, memory = step.costs.seconds, step.costs.peak_bytes
    selected = SELECTION[0] in seconds
    return [
        f"{int(step.rollouts.sum())}/{len(batch)}",
        f"{trained}/{available}",
        _time(sum(seconds[stage] for stage in SELECTION)) if selected else "-",
        _time(seconds[LM_HEAD]),
        _memory(max(memory[stage] for stage in SELECTION)) if selected else "-",
        _memory(memory[LM_HEAD]),
    ]


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _memory(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else "< 1 MB"


def _ratios(theirs: Step, ours: Step) -> tuple[float, float]:
    """Ratios of theirs to ours: the time of selection and LM head together, and the larger of their memory peaks."""
    time = sum(theirs.costs.seconds.values()) / sum(ours.costs.seconds.values())
    return time, max(theirs.costs.peak_bytes.values()) / max(ours.costs.peak_bytes.values())


def agreement(console: Console, batch: Rollouts, entropy: Tensor, points: list[Point]) -> None:
    """Checks that both steps have the same result; ends the run if not."""
    scores = batch.advantages.abs()[:, None] * entropy
    for point in points:
        ours, plain = point.ours, point.plain
        spreads = [float(batch.advantages[step.rollouts].double().var()) for step in (ours, plain)]
        if not math.isclose(*spreads, rel_tol=TOLERANCE):
            raise SystemExit(
                f"FAILED: the variance of the rollouts kept is {spreads[0]}, in plain PyTorch {spreads[1]}."
            )
        chosen_once = scores[ours.tokens != plain.tokens]
        if len(chosen_once) and float(chosen_once.max() - chosen_once.min()) > TOLERANCE * float(scores.max()):
            raise SystemExit("FAILED: the tokens kept differ from plain PyTorch's, and not in equal scores only.")
        if not math.isclose(ours.loss, plain.loss, rel_tol=TOLERANCE) or not point.gradient_error < TOLERANCE:
            raise SystemExit(
                f"FAILED: losses {ours.loss} and {plain.loss}, gradients {point.gradient_error:.0e} apart."
            )

    loss_error = max(abs(point.ours.loss / point.plain.loss - 1) for point in points)
    gradient_error = max(point.gradient_error for point in points)
    swapped = sum(int((point.ours.tokens & ~point.plain.tokens).sum()) for point in points)
    heading(console, "5. The result is the same")
    say(
        console,
        f"On the same tokens the losses agree to {loss_error:.0e} and the gradients of the whole model to "
        f"{gradient_error:.0e} (relative).\nTokens that plain PyTorch by itself chooses otherwise, among equal scores: "
        f"{swapped}.",
    )


def end(console: Console, picture: Path, seconds: float) -> None:
    console.print(f"\nPicture, which tokens of which rollouts were kept: [bold]{picture.resolve()}[/]", soft_wrap=True)
    threads = torch.get_num_threads()
    console.print(f"Done in {seconds:.0f} s on {threads} thread{'s' * (threads > 1)}.")
