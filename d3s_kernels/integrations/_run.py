"""What a choice needs of a run of transformers' ``Trainer``: its processes and its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..schedule import Budget, DownSamplingSchedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RunWithBudget:
    """Stands before the trainer among the bases of a class."""

    accelerator: Any
    args: Any
    state: Any
    _schedule: DownSamplingSchedule

    @property
    def _process_group(self) -> ProcessGroup | None:
        """The group of all processes; None for a single process, which does not use torch.distributed."""
        return torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None

    @property
    def _multiple(self) -> int:
        """The number of kept rows is a multiple of this, so that all micro-batches of all processes have equal size."""
        return int(self.accelerator.num_processes * self.args.steps_per_generation)

    def _budget(self) -> Budget:
        steps = self.state.max_steps
        return self._schedule(min(1.0, self.state.global_step / steps) if steps > 0 else 0.0)
