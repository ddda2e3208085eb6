"""Where slime and miles differ: the names of what the hooks call, and how ranks are found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from .._assumptions import Table
from .._megatron import Ranks, of_megatron
from .table import MILES, SLIME


class Trainer(NamedTuple):
    """A trainer: its table, and what its ranks are."""

    table: Table
    ranks: Callable[[], Ranks]

    @property
    def policy_loss(self) -> str:
        """The place of the trainer's own loss."""
        return next(row.place for row in self.table.assumptions if "policy_loss_function" in row.place)


def _of_miles() -> Ranks:
    state = importlib.import_module("miles.backends.training_utils.parallel").get_parallel_state()

    def group(info: Any) -> ProcessGroup | None:
        return info.group if info.size > 1 else None

    return Ranks(state.cp.size, group(state.tp), state.tp.rank, group(state.intra_dp))


TRAINERS = {"slime": Trainer(SLIME, of_megatron), "miles": Trainer(MILES, _of_miles)}
