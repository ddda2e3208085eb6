"""Counts what the LM head allocates and multiplies at the shapes of a GPU, without one: fake tensors have shapes and no
values, and a dispatch mode sees every op on them.

Fake tensors on a CPU stand in for those of a GPU, whose tiles, slices and wide products they are given: a torch that is
built without CUDA cannot slice a fake tensor on a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d3s_kernels._dispatch import backends
from d3s_kernels._head import problem, products, tiles
from d3s_kernels._head.backward import Incoming
from d3s_kernels._head.backward import backward as head_backward
from d3s_kernels._head.gradients import Wanted
from d3s_kernels._head.problem import HeadProblem
from d3s_kernels._head.shard import WHOLE

GPU = tiles.SIZES["cuda"]


class Traffic(TorchDispatchMode):
    """The products of all ops within, and the peak of the bytes that they allocate beyond the given tensors."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int]] = []  # rows, terms of a sum, columns
        self.peak = self._now = 0
        self._bytes = {tensor.untyped_storage()._cdata: 0 for tensor in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [argument for argument in args if isinstance(argument, Tensor)][-2:]
            self.products.append((a.shape[0], a.shape[1], b.shape[1]))
            if "out" in kwargs:  # torch 2.11 cannot add a wide product to a fake tensor
                return kwargs["out"]
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._allocated(tensor.untyped_storage())
        return result

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._bytes.pop(key, 0)


def _always(*_: Any) -> bool:  # not a Mock, which would keep the tensors alive that it was called with
    return True


def backward(
    rows: int, width: int, vocabulary: int, *, active: int, frozen: bool, softcap: float | None = None
) -> Traffic:
    """The backward of log-probabilities, with a bound on the rows with a gradient, and with or without the weight's."""
    as_gpu = (
        mock.patch.dict(tiles.SIZES, cpu=GPU),
        mock.patch.dict(backends.SLICES, cpu=backends.GPU_SLICE),
        mock.patch.object(products, "widens", _always),
        mock.patch.object(problem, "_check_labels", _always),
    )
    with as_gpu[0], as_gpu[1], as_gpu[2], as_gpu[3], FakeTensorMode():
        hidden, weight = (torch.empty(length, width, dtype=torch.bfloat16) for length in (rows, vocabulary))
        labels = torch.empty(rows, dtype=torch.long)
        gradient, *saved = (torch.empty(rows) for _ in range(4))
        with Traffic(hidden, weight, labels, gradient, *saved) as traffic:
            given = HeadProblem(WHOLE, hidden, weight, labels, logit_softcap=softcap)
            head_backward(given, Incoming(gradient, None, *saved), Wanted(True, not frozen, False), active)
    return traffic
