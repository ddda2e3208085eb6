"""Declares the ops in plain PyTorch: for each op a kernel, and a function for the shapes and dtypes of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import of_schema

Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}
"""Maps the name of each op to its kernel. A kernel is called with the arguments of the op's schema."""

FAKES: dict[str, Kernel] = {}
"""Maps the name of an op to its fake: a function that makes uninitialised results, for torch.compile and
FakeTensorMode. A fake is called with all arguments of the op by name. An op without an entry has no results.
"""


def op(fake: Kernel | None = None) -> Callable[[Kernel], Kernel]:
    """Returns a decorator that declares a function as the kernel of the op with the function's name. ``fake`` has
    parameters for the arguments that it needs, and ``**_`` for the others.
    """

    def declare(kernel: Kernel) -> Kernel:
        KERNELS[kernel.__name__] = of_schema(kernel)
        if fake is not None:
            FAKES[kernel.__name__] = fake
        return kernel

    return declare


def like(name: str, dtype: torch.dtype | None = None) -> Kernel:
    """Makes a fake for an op with one result, with the shape and (by default) the dtype of the argument ``name``."""

    def fake(**arguments: Any) -> Tensor:
        argument: Tensor = arguments[name]
        return argument.new_empty(argument.shape, dtype=dtype or argument.dtype)

    return fake


def row_statistics(like: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Makes four uninitialised results for rows of logits: log-probability, entropy, maximum and log S."""
    return tuple(like.new_empty(shape, dtype=torch.float32) for _ in range(4))
