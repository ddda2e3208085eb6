"""Helpers for launching kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import torch
import triton
from torch import Tensor

# Multiplications and additions are fused only where the code says fma. So the results are bitwise equal with every
# version of Triton and in every variant of a kernel.
EXACT = {"enable_fp_fusion": False}


def warps(threads: int) -> int:
    return max(1, threads // warp_size())


def registers(most: int) -> dict[str, int]:
    """Returns the option that limits each thread to ``most`` registers. Triton has this option only for NVIDIA GPUs."""
    return {} if torch.version.hip else {"maxnreg": most}


def smallest(sizes: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
    """Returns the first size of at least ``length``, and its number of threads. The last size must be large enough."""
    return next((size, threads) for size, threads in sizes if length <= size)


@cache
def warp_size() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 32
    return int(triton.runtime.driver.active.get_current_target().warp_size)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
