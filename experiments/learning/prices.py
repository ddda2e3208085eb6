"""Measures the prices: what a generated token, a scored, an updated and a kept row, and an optimiser's step cost here.

Each is the median over several batches of the full size. Whole steps of every arm are then measured too, and compared
with what the prices say of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch
from transformers import PreTrainedModel

import d3s_kernels as d3s
from benchmarks.machine import describe

from .arms import Arm
from .generate import sample
from .ledger import Counts, Prices
from .problems import Problem
from .run import step
from .setting import Setting
from .update import add_sum, forward

REPEATS, LONGEST = 5, 20.0  # after this many seconds no further measurement begins
SEED = 0

Result = TypeVar("Result")


def measure(model: PreTrainedModel, problem: Problem, setting: Setting) -> Prices:
    """Seconds on this machine, with the threads of a run."""
    random = torch.Generator(model.device).manual_seed(SEED)
    found = repeated(lambda: measure_once(model, problem, setting, random))
    return Prices(*(median(column) for column in zip(*found, strict=True)))


def measure_once(model: PreTrainedModel, problem: Problem, setting: Setting, random: torch.Generator) -> Prices:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    tasks = problem.train[: setting.prompts]
    made, generation = timed(lambda: sample(model, problem.tokenizer, tasks, setting.many, problem.longest, random))
    rows = torch.arange(len(made.prompt), device=model.device)
    advantages = torch.ones(len(rows), device=model.device)
    tokens = forward(model, made, advantages, rows)
    hidden, count = tokens.hidden.detach().requires_grad_(), len(tokens.labels)
    head = d3s.lm_head(model)

    def score() -> torch.Tensor:
        return d3s.linear_logprob_entropy(hidden, labels=tokens.labels, **head)[0]

    _, scoring = timed(torch.no_grad()(score))
    _, loss = timed(lambda: score().sum().backward())
    _, body = timed(lambda: add_sum(model, made, advantages))
    _, optimiser = timed(lambda: (optimizer.step(), optimizer.zero_grad()))
    updated = (body - loss) / int(made.lengths().sum())
    return Prices(generation / count, scoring / count, updated, loss / count, optimiser)


def whole_step(model: PreTrainedModel, problem: Problem, setting: Setting, arm: Arm) -> tuple[float, Counts]:
    """The seconds of an arm's steps in the middle of its schedule, and what was done in them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    random = torch.Generator(model.device).manual_seed(SEED)
    tasks = problem.train[: setting.prompts]
    made = repeated(lambda: timed(lambda: step(setting, problem, model, optimizer, tasks, arm, 0.5, random)))
    updates, seconds = zip(*made, strict=True)
    return sum(seconds), sum((update.counts for update in updates), Counts())


def repeated(measure: Callable[[], Result]) -> list[Result]:
    """What several calls give, without the first one, which warms up. They are fewer where a user's model is slow."""
    measure()
    found: list[Result] = []
    begin = time.perf_counter()
    while len(found) < REPEATS and (not found or time.perf_counter() - begin < LONGEST):
        found.append(measure())
    return found


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def machine(device: torch.device) -> str:
    """Processor or GPU, versions and commit."""
    facts = describe(device.type)
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if name != "trl")
    where = f"{facts.get('gpu') or facts['cpu']}, {facts['cores']} cores"
    return f"{where}, {facts['threads']} thread(s) a run, {versions}, commit {facts['commit']}, {facts['date']}"
