"""The sequence of the demo: answers, GRPO's update, D3S's updates, the table and the page."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn.utils.rnn import pad_sequence

import d3s_kernels as d3s

from . import models, plain, report, threads, update
from .problems import draw
from .rollouts import Recorded, record

PROMPTS, GROUP, LENGTH = 2, 8, 28  # problems, answers to each, tokens of an answer at most
# The paper's schedule, from 8 of 32 rollouts and 5 % of their tokens to all 32 and 20 %, scaled to 8 rollouts.
SCHEDULE = d3s.DownSamplingSchedule(d3s.Budget(GROUP // 4, 0.05), d3s.Budget(GROUP, 0.20))
WHEN = {"start": 0.0, "middle": 0.5, "end": 1.0}
CHECKED = ("start", "middle")  # compared with plain PyTorch, which at the end would take as long as GRPO's update

# Seconds of the stages, with SmolLM2 and the seed 1, on two cores of an Intel Xeon with AVX-512.
SECONDS = {
    "making and training a tiny model": 0,  # not with SmolLM2
    "loading the model": 1,
    "generating the answers": 8,
    "GRPO's update": 16,
    "GRPO's update with our LM head": 10,
    "D3S's update, start of training": 4,
    "the same in plain PyTorch, start": 3,
    "D3S's update, middle of training": 6,
    "the same in plain PyTorch, middle": 5,
    "D3S's update, end of training": 13,
}


def run(folder: Path | None, out: Path, seed: int) -> None:
    warnings.filterwarnings("ignore")  # of TRL and transformers, about their own options
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    console = Console(highlight=False)
    console.width = report.WIDTH
    report.introduce(console, folder, PROMPTS, GROUP, threads.take_the_faster())
    with Work(console) as work:
        model, tokenizer = get_model(folder, seed, work)
        recorded, generation = generate(model, tokenizer, seed, work)
        report.answers(console, recorded)
        everything, our_head, points = updates(model, tokenizer, recorded, work)
    console.print(report.table(recorded, generation, everything, our_head, points))
    report.conclude(console, generation, everything, our_head, points)
    path = out / "selection.html"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(page(recorded, points[1], tokenizer), encoding="utf-8")
    console.print(f"\nThe answers, token by token, as D3S trained on them in the middle: [bold]{path}[/]")


def get_model(folder: Path | None, seed: int, work: Work) -> tuple[Any, Any]:
    """The model, on the GPU if there is one, and its tokenizer."""
    if folder is not None:
        work.begin("loading the model")
        model, tokenizer = models.from_folder(folder)
    else:
        work.begin("making and training a tiny model", parts=models.STEPS)
        model, tokenizer = models.made_here(seed, work.advance)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def generate(model: Any, tokenizer: Any, seed: int, work: Work) -> tuple[Recorded, float]:
    """The recorded answers, and the seconds that they took."""
    random_ = random.Random(seed)
    problems = [draw(random_) for _ in range(PROMPTS)]
    work.begin("generating the answers", parts=LENGTH)
    torch.manual_seed(seed)
    began = time.perf_counter()
    recorded = record(model, tokenizer, problems, GROUP, LENGTH, work.advance)
    return recorded, time.perf_counter() - began


def updates(
    model: Any, tokenizer: Any, recorded: Recorded, work: Work
) -> tuple[update.Update, update.Update, list[report.Point]]:
    """GRPO's update, the same with our LM head, and D3S's at each point of the schedule, all from the same weights."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    work.begin("GRPO's update", parts=update.MICRO_BATCHES)
    everything = update.grpo(model, tokenizer, recorded, work.advance)
    model.load_state_dict(weights)
    work.begin("GRPO's update with our LM head", parts=update.MICRO_BATCHES)
    our_head = update.grpo(model, tokenizer, recorded, work.advance, our_head=True)
    points = []
    for when, progress in WHEN.items():
        budget = SCHEDULE(progress)
        model.load_state_dict(weights)
        work.begin(f"D3S's update, {when} of training", parts=update.MICRO_BATCHES)
        ours = update.with_d3s(model, tokenizer, recorded, budget, work.advance)
        difference = None
        if when in CHECKED:
            model.load_state_dict(weights)
            work.begin(f"the same in plain PyTorch, {when}")
            difference = plain.relative_difference(ours.gradient, plain.gradient(model, ours.batch))
        points.append(report.Point(when, ours, difference))
    return everything, our_head, points


def page(recorded: Recorded, point: report.Point, tokenizer: Any) -> str:
    """A page that shows what an update was made of."""
    batch = {name: value.cpu() for name, value in point.update.batch.items()}
    advantages = d3s.group_advantages(recorded.rewards)
    kept = d3s.select_rollouts(advantages, SCHEDULE(WHEN[point.when]).rollouts)
    completions = [torch.tensor(tokens) for tokens in recorded.completions]
    return d3s.selection_page(
        [problem.question for problem in recorded.problems],
        pad_sequence(completions, batch_first=True),
        batch["d3s_kept"],
        entropy=batch["d3s_entropy"],
        advantages=advantages,
        kept_rollouts=kept,
        rewards=recorded.rewards,
        mask=pad_sequence([torch.ones_like(tokens) for tokens in completions], batch_first=True),
        tokenizer=tokenizer,
        title=f"What D3S trains on ({point.when} of training)",
    )


class Work:
    """A progress bar over all stages, with the seconds that each took where they were measured."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description:64}"), BarColumn(None), TimeElapsedColumn()
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=sum(SECONDS.values()))
        self._end = 0.0  # of the current stage
        self._part = 0.0

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def begin(self, what: str, parts: int = 1) -> None:
        """Begins a stage of `SECONDS`, and so ends the previous stage."""
        seconds = SECONDS[what]
        took = f" (SmolLM2: {seconds} s on two Xeon cores)" if seconds else ""
        self._bar.update(self._task, description=f"{what}{took}", completed=self._end)
        self._end += seconds
        self._part = seconds / parts

    def advance(self) -> None:
        """A part of the stage is done."""
        self._bar.update(self._task, advance=self._part)
