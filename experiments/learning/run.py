"""One run: an arm, a learning rate and a seed, trained for the priced time and evaluated on the way."""

from __future__ import annotations

import random as python_random
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .arms import Arm
from .evaluate import evaluate, rewards
from .generate import sample
from .ledger import Counts, Prices
from .problems import Problem, Task
from .setting import Setting
from .update import Update, add_gradient

WARM_UP = 0.05  # of the priced time, in which the learning rate rises


@dataclass(frozen=True)
class Job:
    arm: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.arm}, learning rate {self.rate:g}, seed {self.seed}"


class Point(NamedTuple):
    """An evaluation. Counts are from the start of the run."""

    counts: Counts
    positive: int  # kept tokens whose advantage was above 0
    first: float  # Pass@1 on held-out prompts of the training's lengths
    any: float  # Pass@8 on them
    longer_first: float | None = None  # on longer ones, at the start and at the end
    longer_any: float | None = None


def train(
    setting: Setting, problem: Problem, model: PreTrainedModel, arm: Arm, job: Job, prices: Prices, horizon: float
) -> list[Point]:
    """Trains the model for ``horizon`` priced seconds. The same arguments give the same points, to the bit."""
    torch.manual_seed(job.seed)
    random = torch.Generator(model.device).manual_seed(job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate, weight_decay=0.0)
    batches = batches_of(problem.train, setting.prompts, job.seed)
    done, positive = Counts(), 0
    versions: deque[PreTrainedModel] = deque(maxlen=arm.staleness + 1)
    points = [point(setting, problem, model, done, positive, longer=True)]
    while prices.of(done) < horizon:
        progress = prices.of(done) / horizon
        for group in optimizer.param_groups:
            group["lr"] = job.rate * min(1.0, (progress + 1 / setting.steps) / WARM_UP)
        versions.append(deepcopy(model) if arm.staleness else model)
        update = step(setting, problem, model, optimizer, next(batches), arm, progress, random, versions[0])
        done += update.counts
        positive += update.positive
        if prices.of(done) >= len(points) / setting.evaluations * horizon:
            points.append(point(setting, problem, model, done, positive, longer=prices.of(done) >= horizon))
    return points


def step(
    setting: Setting,
    problem: Problem,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tasks: Sequence[Task],
    arm: Arm,
    progress: float,
    random: torch.Generator,
    sampler: PreTrainedModel | None = None,
) -> Update:
    """Generates for these tasks, with ``sampler`` or the model itself, and makes one step of the optimiser."""
    rollouts = sample(sampler or model, problem.tokenizer, tasks, arm.generated, problem.longest, random)
    found = rewards(rollouts, problem.tokenizer, tasks)
    update = add_gradient(model, rollouts, found, arm, arm.schedule(progress), random, setting.micro_batch)
    optimizer.step()
    optimizer.zero_grad()
    return update._replace(counts=update.counts._replace(generated=int(rollouts.completion_mask.sum())))


def batches_of(tasks: Sequence[Task], size: int, seed: int) -> Iterator[Sequence[Task]]:
    """Epoch after epoch, each in an order of its own; all arms of a seed see the same batches."""
    order = python_random.Random(seed)
    while True:
        shuffled = order.sample(tasks, len(tasks))
        for first in range(0, len(shuffled) - size + 1, size):
            yield shuffled[first : first + size]


def point(
    setting: Setting, problem: Problem, model: PreTrainedModel, done: Counts, positive: int, *, longer: bool
) -> Point:
    own = evaluate(model, problem.tokenizer, problem.held_out[: setting.held_out], problem.longest)
    beyond = (None, None)
    if longer and problem.longer:
        beyond = evaluate(model, problem.tokenizer, problem.longer[: setting.held_out], problem.longest_of_longer)
    return Point(done, positive, *own, *beyond)
