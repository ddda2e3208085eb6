"""Declares the ops of plain PyTorch: each op's kernel, and beside it the shapes and dtypes of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._together import of_schema

Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}
"""The kernels by op. They are called with the arguments of the op's schema."""

FAKES: dict[str, Kernel] = {}
"""For torch.compile and FakeTensorMode: functions by op, which make uninitialised results. They are called with all
arguments by name. An op without an entry has no results.
"""


def op(fake: Kernel | None = None) -> Callable[[Kernel], Kernel]:
    """Declares a function as the kernel of the op with the function's name. ``fake`` takes the arguments that it needs,
    and ``**_`` for the others.
    """

    def declare(kernel: Kernel) -> Kernel:
        KERNELS[kernel.__name__] = of_schema(kernel)
        if fake is not None:
            FAKES[kernel.__name__] = fake
        return kernel

    return declare


def like(name: str, dtype: torch.dtype | None = None) -> Kernel:
    """Makes a fake for an op with one result. The result has the shape of the argument ``name``; ``dtype`` defaults to
    the dtype of this argument.
    """

    def fake(**arguments: Any) -> Tensor:
        argument: Tensor = arguments[name]
        return argument.new_empty(argument.shape, dtype=dtype or argument.dtype)

    return fake


def row_statistics(device: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Uninitialised results for rows of logits: log-probability, entropy, maximum and log S."""
    return tuple(device.new_empty(shape, dtype=torch.float32) for _ in range(4))
