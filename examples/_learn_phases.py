"""Measures where the time of a training run goes: times the trainer's methods, and counts each second in one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

GENERATION, SELECTION, UPDATE, OTHER = "generation", "selection and scoring", "update", "other"
PHASES = (GENERATION, SELECTION, UPDATE, OTHER)
ASIDE = "evaluation"  # not part of training, so in no phase and in no total


class Stopwatch:
    """Counts each second for the innermost active phase, or for `other` if no phase is active."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, ASIDE), 0.0)
        self._running = [OTHER]
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        self.lap()
        self._running.append(phase)

    def leave(self) -> None:
        self.lap()
        self._running.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def lap(self) -> None:
        """Adds the time since the last call to the current phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the GPU may still be working when a method returns
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


def watch(trainer: GRPOTrainer, stopwatch: Stopwatch) -> None:
    """Times a trainer's methods. If a timed method calls another one, the inner time counts only for the inner one."""

    def timed(owner: object, method: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def call(*arguments: Any, **options: Any) -> Any:
            with stopwatch.phase(phase):
                return original(*arguments, **options)

        setattr(owner, method, call)

    timed(trainer, "_generate", GENERATION)
    # Rewards, old log-probabilities and D3S's selection.
    timed(trainer, "_generate_and_score_completions", SELECTION)
    timed(trainer, "training_step", UPDATE)  # forward and backward
    timed(trainer.accelerator, "clip_grad_norm_", UPDATE)
    trainer.add_callback(_OptimizerStep(stopwatch))


class _OptimizerStep(TrainerCallback):
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self.stopwatch.enter(UPDATE)

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self.stopwatch.leave()
