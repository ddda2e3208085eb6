"""Helpers that every launch uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor

# Multiplications and additions are fused only where the code says fma, so that every version of Triton and every
# variant of a kernel gives the same bits.
EXACT = {"enable_fp_fusion": False}


def warps(threads: int) -> int:
    return max(1, threads // warp_size())


def registers(most: int) -> dict[str, int]:
    """An option of a launch: at most so many registers for a thread. Only on NVIDIA has Triton such an option."""
    return {} if torch.version.hip else {"maxnreg": most}


def smallest(sizes: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
    """The first size that holds ``length``, and its threads. ``length`` must not exceed the last size."""
    return next((size, threads) for size, threads in sizes if length <= size)


@cache
def warp_size() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 32
    return int(triton.runtime.driver.active.get_current_target().warp_size)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
