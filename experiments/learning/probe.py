"""The gradient probe: how near each arm's gradient is to that of the mean reward, without any learning rate.

At three points of training, the reference is the policy gradient of the mean reward over all prompts of training, from
20,000 rollouts with the leave-one-out baseline, which has no bias. Each arm's gradient is taken on the same batches.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import policy
from .arms import Arm, arms
from .evaluate import evaluate, rewards
from .generate import Rollouts, sample
from .ledger import Prices
from .problems import Problem
from .run import batches_of, step
from .setting import Setting
from .update import add_gradient, add_sum

SEED = 2000
LEVELS = {0.2: 0.0, 0.5: 0.5, 0.75: 1.0}  # Pass@1 to probe at, and the progress of the schedule there
REFERENCE, BATCHES = 20_000, 32  # rollouts of the reference, and batches of an arm
RATE, BETWEEN_CHECKS, MOST_STEPS = 1e-4, 10, 1000  # of the training that leads from one level to the next


class Probed(NamedTuple):
    """An arm's gradient g against the reference direction u, over the batches."""

    level: float  # Pass@1 of the model
    arm: str
    cosine: float  # of one batch's gradient and u: the mean over batches
    cosine_of_mean: float  # of the mean gradient and u: what is missing to 1 is bias, and the noise that is left
    signal_to_noise: float  # (mean of g . u)^2 / the sum of the variances of g's elements, of one batch
    seconds: float  # priced, of one batch
    of_halves: float  # the cosine of the reference's halves

    @property
    def per_second(self) -> float:
        """Signal to noise of as many batches as fit into a priced second."""
        return self.signal_to_noise / self.seconds


class Reference(NamedTuple):
    direction: Tensor  # of length 1
    of_halves: float  # the cosine between the gradients of its halves, which says how much of it is noise


def reference(model: PreTrainedModel, problem: Problem, random: torch.Generator) -> Reference:
    halves = []
    count = round(REFERENCE / 2 / len(problem.train))  # rollouts of a prompt, in each half
    for _ in range(2):
        for task in problem.train:
            made = sample(model, problem.tokenizer, [task], count, problem.longest, random)
            found = rewards(made, problem.tokenizer, [task]).to(model.device)
            advantages = (found - found.mean(1, keepdim=True)) * count / (count - 1)
            add_sum(model, made, advantages.flatten())
        halves.append(taken(model))
    both = halves[0] + halves[1]
    return Reference(both / both.norm(), float(torch.cosine_similarity(*halves, dim=0)))


def taken(model: PreTrainedModel) -> Tensor:
    """The gradient as one vector, which the model then no longer has."""
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def probe(setting: Setting, problem: Problem, model: PreTrainedModel, level: float, prices: Prices) -> list[Probed]:
    """All arms with fresh samples at one point of training."""
    random = torch.Generator(model.device).manual_seed(SEED)
    towards, of_halves = reference(model, problem, random)
    every = [arm for arm in arms(setting.many, setting.few).values() if not arm.staleness]
    sums = {arm: Sums(torch.zeros_like(towards)) for arm in every}
    batches = batches_of(problem.train, setting.prompts, SEED)
    for _ in range(BATCHES):
        tasks = next(batches)
        made = sample(model, problem.tokenizer, tasks, setting.many, problem.longest, random)
        found = rewards(made, problem.tokenizer, tasks)
        for arm in every:
            own, own_rewards = first_of(made, found, arm)
            update = add_gradient(model, own, own_rewards, arm, arm.schedule(LEVELS[level]), random)
            counts = update.counts._replace(generated=int(own.completion_mask.sum()))
            sums[arm].add(taken(model), towards, prices.of(counts))
    return [Probed(level, arm.name, *sums[arm].result(towards), of_halves) for arm in every]


def first_of(made: Rollouts, found: Tensor, arm: Arm) -> tuple[Rollouts, Tensor]:
    """The first rollouts of each prompt, as many as the arm generates."""
    rows = torch.arange(found.numel(), device=made.prompt.device).view_as(found)[:, : arm.generated]
    return made.rows(rows.flatten()), found[:, : arm.generated]


class Sums:
    """What the batches of an arm add up to."""

    def __init__(self, zeros: Tensor) -> None:
        self.gradient, self.squares, self.cosines, self.seconds, self.batches = zeros, 0.0, 0.0, 0.0, 0

    def add(self, gradient: Tensor, towards: Tensor, seconds: float) -> None:
        length = float(gradient.norm())
        self.gradient = self.gradient + gradient
        self.squares += length**2
        self.cosines += float(gradient @ towards) / length if length else 0.0
        self.seconds += seconds
        self.batches += 1

    def result(self, towards: Tensor) -> tuple[float, float, float, float]:
        mean = self.gradient / self.batches
        noise = (self.squares - self.batches * float(mean.norm()) ** 2) / (self.batches - 1)
        signal = float(mean @ towards) ** 2
        of_mean = float(mean @ towards) / float(mean.norm())
        return self.cosines / self.batches, of_mean, signal / noise, self.seconds / self.batches


def climb(setting: Setting, problem: Problem, model: PreTrainedModel, level: float) -> None:
    """Trains the model with GRPO and few rollouts, the fastest, until its Pass@1 on held-out prompts is this high."""
    random = torch.Generator(model.device).manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    batches = batches_of(problem.train, setting.prompts, SEED)
    arm = arms(setting.many, setting.few)[f"GRPO-{setting.few}"]
    for number in range(1, MOST_STEPS + 1):
        step(setting, problem, model, optimizer, next(batches), arm, 0.0, random)
        if number % BETWEEN_CHECKS:
            continue
        if evaluate(model, problem.tokenizer, problem.held_out, problem.longest).first >= level:
            return
    raise RuntimeError(f"{MOST_STEPS} steps of GRPO-{setting.few} did not lead to a Pass@1 of {level}")


def make_models(setting: Setting) -> None:
    """A model for each level: from supervised training, which ends where it does for the runs, then from GRPO."""
    problem, model = setting.problem(), None
    for level in LEVELS:
        if exists(setting, level):
            model = policy.load(folder(setting, level)) if level > setting.enough else None
            continue
        if model is None:
            model = policy.warm_up(problem, SEED, min(level, setting.enough), setting.slips)
        if level > setting.enough:
            climb(setting, problem, model, level)
        model.save_pretrained(folder(setting, level))
        if level <= setting.enough:
            model = None  # GRPO learns nothing from a model whose supervised training ended this early


def exists(setting: Setting, level: float) -> bool:
    return (folder(setting, level) / "config.json").exists()


def folder(setting: Setting, level: float) -> Path:
    return setting.folder / "probe" / f"{level:g}"


def save(path: Path, probed: list[Probed]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Probed._fields)
        writer.writerows(probed)


def load(path: Path) -> list[Probed]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Probed(float(row.pop("level")), row.pop("arm"), *map(float, row.values())) for row in csv.DictReader(file)
        ]
