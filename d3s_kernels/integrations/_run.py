"""What the selection needs to know about a run of transformers' ``Trainer``: its processes and its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..schedule import Budget
from ..selection import Selection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RunWithBudget:
    """A mixin: list it before the trainer among the base classes."""

    accelerator: Any
    args: Any
    state: Any
    num_generations: int
    _selection: Selection
    _draws: tuple[int, torch.Generator] | None = None  # the step, and its generator for the rule "random"

    @property
    def _process_group(self) -> ProcessGroup | None:
        """The group of all processes; None for a single process, which does not use torch.distributed."""
        return torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None

    @property
    def _multiple(self) -> int:
        """The number of kept rows is a multiple of this, so that all micro-batches of all processes have equal size."""
        return int(self.accelerator.num_processes * self.args.steps_per_generation)

    @property
    def _progress(self) -> float:
        steps = self.state.max_steps
        return min(1.0, self.state.global_step / steps) if steps > 0 else 0.0

    def _budget(self) -> Budget:
        return self._selection.budget(self._progress, self.num_generations)

    def _draws_of_step(self, device: torch.device) -> torch.Generator | None:
        """For the rule "random": a generator seeded with the step, so the same on all processes and after a resume."""
        step = self.state.global_step
        if self.args.rollout_rule != "random":
            return None
        if self._draws is None or self._draws[0] != step:
            self._draws = step, torch.Generator(device).manual_seed(self.args.seed + 1_000_003 * step)
        return self._draws[1]
