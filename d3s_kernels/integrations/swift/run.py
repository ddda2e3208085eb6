"""What the choices of rollouts and of tokens both need of a run: its processes, its budget and its log."""

from __future__ import annotations

import math
from typing import Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import Tensor

from ...selection import Selection
from .._run import RunWithBudget
from .config import D3SConfig

NO_TEACHER = "D3S takes none, since advantages of tokens come after the choice of rollouts"


class Run(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # ms-swift has no types
    """ms-swift's trainer with a budget that follows the run.

    Raises:
        TypeError: ``args`` is not a :class:`D3SConfig`.
        ValueError: what the choice does not cover and only the trainer knows of.
    """

    args: D3SConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if not isinstance(options["args"], D3SConfig):
            raise TypeError(f"args: got a {type(options['args']).__name__}; takes a D3SConfig")
        super().__init__(*arguments, **options)
        if self.template.sequence_parallel_size > 1:
            given = self.template.sequence_parallel_size
            raise ValueError(f"sequence_parallel_size: got {given}; D3S takes 1, where a process has whole sequences")
        if self._has_teacher_explicit():
            raise ValueError(f"teacher_model, teacher_model_server: got a teacher; {NO_TEACHER}")
        self._selection = Selection(self.args)

    def _log(self, metrics: dict[str, Tensor]) -> None:
        """Keeps 0-d tensors for the next log, as numbers, which ms-swift's log takes. NaN: there is nothing to log."""
        numbers = torch.stack([value.double() for value in metrics.values()]).tolist()
        for name, number in zip(metrics, numbers, strict=True):
            if not math.isnan(number):
                self._metrics["train"][name].append(number)
