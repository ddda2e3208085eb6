"""The setting that all arms share: the task, and the amount of generation, training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """Fixed for a comparison, and sent to the worker processes."""

    work: Path  # folder for warmed-up models and the trainers' files
    model: Path | None  # a model to start from; None: the example's own, warmed up
    dataset: Path | None
    steps: int  # of the optimiser
    group: int  # rollouts of a prompt
    prompts: int  # of a generation batch
    steps_per_batch: int  # of the optimiser, on one generation batch
    micro_batch: int  # rollouts in one forward
    completion: int  # tokens at most
    held_out: int  # prompts of the evaluation
    evaluate_every: int  # steps
    warm_up_steps: int
    jobs: int  # runs at a time, each in a worker process
    threads: int  # of a worker process

    @property
    def rollouts(self) -> int:
        """Rollouts of a generation batch."""
        return self.prompts * self.group

    @property
    def accumulated(self) -> int:
        """Forwards of an optimiser step."""
        return self.rollouts // (self.steps_per_batch * self.micro_batch)


@dataclass(frozen=True)
class Job:
    """One run: an arm at a learning rate, from a seed."""

    arm: str
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.arm}, learning rate {self.learning_rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    step: int
    reward: float  # mean over the held-out prompts
    tokens: int  # tokens with a gradient so far
    seconds: dict[str, float]  # seconds of each phase so far

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Run:
    job: Job
    points: tuple[Point, ...]
