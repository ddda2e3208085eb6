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
"""For torch.compile and FakeTensorMode: makes uninitialised results. Called with all arguments by name. An op without
an entry has no results.
"""


def op(fake: Kernel | None = None) -> Callable[[Kernel], Kernel]:
    """Declares the kernel of the op that has its name. ``fake`` takes the arguments that it needs, and ``**_``."""

    def declare(kernel: Kernel) -> Kernel:
        KERNELS[kernel.__name__] = of_schema(kernel)
        if fake is not None:
            FAKES[kernel.__name__] = fake
        return kernel

    return declare


def like(name: str, dtype: torch.dtype | None = None) -> Kernel:
    """One result with the shape of the argument ``name``, and with its dtype unless another is given."""

    def fake(**arguments: Any) -> Tensor:
        argument: Tensor = arguments[name]
        return argument.new_empty(argument.shape, dtype=dtype or argument.dtype)

    return fake


def row_statistics(device: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Log-probability, entropy, maximum and log S of rows of logits."""
    return tuple(device.new_empty(shape, dtype=torch.float32) for _ in range(4))
