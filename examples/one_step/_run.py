"""The sequence of `make step`, from warm-up to picture. `_task`, `_step` and `_cost` do the work, `_report` prints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import _report as report
import torch
from _cost import Costs
from _picture import save_picture
from _step import Step, completion_hidden, d3s_step, plain_step, relative_error
from _task import MAX_COMPLETION, Rollouts, Task, new_model, sample_completions, score, warm_up
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import Qwen2ForCausalLM

import d3s_kernels as d3s

GROUP_SIZE = 8
PAPER_GROUP_SIZE = 32
PROGRESS = (0.0, 0.5, 1.0)


@dataclass
class Point:
    """A point of the schedule, with the same step done in two ways."""

    progress: float
    ours: Step
    plain: Step
    gradient_error: float  # of ours relative to plain


def run(seed: int, out: Path, short: bool, console: Console) -> None:
    begin = time.perf_counter()
    torch.manual_seed(seed)
    task = Task(seed)
    model = warmed_up(new_model(task), task, steps=170 if short else 260, console=console)
    batch = sampled(model, task, prompts=4 if short else 8, console=console)
    entropy = entropy_of(model, batch)
    report.rollouts(console, task, batch, entropy)

    schedule = scaled_schedule(console)
    points, everything = measured(model, batch, schedule, repeats=1 if short else 2, console=console)
    report.costs(console, batch, points, everything)
    report.agreement(console, batch, entropy, points)

    save_picture(out, task, batch, entropy, points)
    report.end(console, out, time.perf_counter() - begin)


def bar(console: Console) -> dict[str, object]:
    return {"console": console, "transient": True, "disable": not console.is_terminal}


def warmed_up(model: Qwen2ForCausalLM, task: Task, steps: int, console: Console) -> Qwen2ForCausalLM:
    losses = list(track(warm_up(model, task, steps), "Warming up", steps, **bar(console)))
    report.model(console, model, losses)
    return model


def sampled(model: Qwen2ForCausalLM, task: Task, prompts: int, console: Console) -> Rollouts:
    questions = [task.question() for _ in range(prompts)]
    progress = sample_completions(model, task, questions, GROUP_SIZE)
    *_, tokens = track(progress, "Sampling", MAX_COMPLETION, **bar(console))
    return score(task, questions, tokens)


@torch.no_grad()
def entropy_of(model: Qwen2ForCausalLM, batch: Rollouts) -> Tensor:
    hidden = completion_hidden(model, batch)
    return d3s.linear_logprob_entropy(hidden, model.lm_head.weight, batch.labels, mask=batch.mask)[1]


def scaled_schedule(console: Console) -> d3s.DownSamplingSchedule:
    """The paper's schedule, which is for groups of 32, scaled to this group size."""
    paper = d3s.DownSamplingSchedule()
    start, end = (
        d3s.Budget(budget.rollouts * GROUP_SIZE // PAPER_GROUP_SIZE, budget.token_ratio)
        for budget in (paper.start, paper.end)
    )
    schedule = d3s.DownSamplingSchedule(start, end)
    report.schedule(console, paper, PAPER_GROUP_SIZE, schedule, GROUP_SIZE)
    return schedule


def measured(
    model: Qwen2ForCausalLM, batch: Rollouts, schedule: d3s.DownSamplingSchedule, repeats: int, console: Console
) -> tuple[list[Point], Step]:
    """Measures each point of the schedule, and the plain step that keeps everything, in turns, `repeats` times."""
    compared(model, batch, schedule, 0.0)  # not counted: the first call also loads code and allocates buffers
    points: dict[float, list[Point]] = {progress: [] for progress in PROGRESS}
    everything = []
    for progress in track([*PROGRESS, None] * repeats, "Measuring", **bar(console)):
        if progress is None:
            everything.append(plain_step(model, batch))
            everything[-1].gradients.clear()
        else:
            points[progress].append(compared(model, batch, schedule, progress))
    for runs in points.values():
        runs[0].ours.costs = Costs.of_runs([run.ours.costs for run in runs])
        runs[0].plain.costs = Costs.of_runs([run.plain.costs for run in runs])
    everything[0].costs = Costs.of_runs([step.costs for step in everything])
    return [runs[0] for runs in points.values()], everything[0]


def compared(model: Qwen2ForCausalLM, batch: Rollouts, schedule: d3s.DownSamplingSchedule, progress: float) -> Point:
    ours = d3s_step(model, batch, schedule(progress))
    plain = plain_step(model, batch, schedule(progress), train_on=ours)
    point = Point(progress, ours, plain, relative_error(ours.gradients, plain.gradients))
    for step in (ours, plain):
        step.gradients.clear()  # they are large: two tables of the vocabulary's size
    return point
