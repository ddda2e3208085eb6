"""A stand-in for parts of megatron-core, on the groups of ranks without a GPU. Written from 0.16.1. And the recipes of
examples/trainers, for which parts of a trainer are installed likewise.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


def parallel_state(vocabulary: Any, rank: int, data: Any, context: int = 1, last_stage: bool = True) -> Any:
    """``megatron.core.parallel_state`` of one rank."""
    return SimpleNamespace(
        get_context_parallel_world_size=lambda: context,
        get_tensor_model_parallel_group=lambda: vocabulary,
        get_tensor_model_parallel_rank=lambda: rank,
        get_data_parallel_group=lambda with_context_parallel=False: data,
        is_pipeline_last_stage=lambda: last_stage,
    )


class Summed(torch.autograd.Function):
    """``_CopyToModelParallelRegion``: a tensor as it is. Its gradient is the sum of the ranks', here in float32."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.float().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


class Gather(torch.autograd.Function):
    """``_GatherFromSequenceParallelRegion``: its backward takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def gather_from_sequence_parallel_region(input_: Tensor, group: Any) -> Tensor:
    """``tensor_parallel/mappings.py``, with its defaults: the ranks' gradients are summed."""
    return Summed.apply(Gather.apply(input_, group), group)


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Any) -> Tensor:
    """``tensor_parallel/mappings.py``."""
    return Summed.apply(input_, group)


@contextmanager
def installed(modules: dict[str, Any]) -> Iterator[None]:
    """These modules can be imported by their names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


def recipe(name: str, modules: dict[str, Any]) -> ModuleType:
    """A recipe, imported under its name beside these modules."""
    path = Path(__file__).parents[1] / "examples" / "trainers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with installed(modules):
        spec.loader.exec_module(module)
    return module
