"""Counts what torch.distributed is asked to send. It counts where torch dispatches, so it sees every caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d3s_kernels import _collectives

_SENT = ("input", "input_tensor", "input_tensors", "tensors")  # the schemas' names for what a rank sends


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function):
            names = [argument.name for argument in function._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            sent = [leaf for name in _SENT for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
            bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in sent)
            self.calls.append((function._schema.name.split("::")[1].strip("_"), bytes_))
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Records the collectives of this process in the block: each one's name, and the bytes of the tensors it gets.

    For an all-gather these are the rank's own part; for an all-to-all, what it sends to all ranks, including itself.
    """
    with _Counter() as counter:
        yield counter.calls


@contextmanager
def asked() -> Iterator[list[tuple[str, torch.Size, torch.dtype]]]:
    """Records the tensors this rank gives to collectives inside ops, where a dispatch mode does not see them."""
    told: list[tuple[str, torch.Size, torch.dtype]] = []
    all_reduce, all_gather = dist.all_reduce, _collectives._all_gather

    def reduce(values: Tensor, *arguments: Any, **options: Any) -> Any:
        told.append(("all_reduce", values.shape, values.dtype))
        return all_reduce(values, *arguments, **options)

    def gather(out: Tensor, values: Tensor, **options: Any) -> Any:
        told.append(("all_gather", values.shape, values.dtype))
        return all_gather(out, values, **options)

    with mock.patch.object(dist, "all_reduce", reduce), mock.patch.object(_collectives, "_all_gather", gather):
        yield told
