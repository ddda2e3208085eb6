"""The groups of ranks in trainers that are built on Megatron."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from torch.distributed import ProcessGroup

from ._assumptions import Assumption

MEGATRON = Assumption(
    "", "megatron.core.parallel_state", "defines",
    "get_context_parallel_world_size get_tensor_model_parallel_world_size get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_group get_data_parallel_group",
    "the groups of ranks",
)  # fmt: skip
"""Each trainer's table says which of its functions need it."""


class Ranks(NamedTuple):
    """The ranks that work with this one; a group is None where it is this rank alone."""

    context_parallel: int
    tensor_parallel: ProcessGroup | None
    tensor_rank: int
    data_parallel: ProcessGroup | None


def of_megatron() -> Ranks:
    state = importlib.import_module("megatron.core.parallel_state")
    split = state.get_tensor_model_parallel_world_size() > 1
    return Ranks(
        state.get_context_parallel_world_size(),
        state.get_tensor_model_parallel_group() if split else None,
        state.get_tensor_model_parallel_rank(),
        state.get_data_parallel_group(),
    )
