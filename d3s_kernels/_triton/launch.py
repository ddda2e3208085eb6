"""What every launch has in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import triton
from torch import Tensor

# Nothing is contracted but what is written as fma: the same bits from every version of Triton and every variant of a
# kernel.
EXACT = {"enable_fp_fusion": False}


def warps(threads: int) -> int:
    return max(1, threads // warp_size())


def smallest(sizes: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
    """The first size that holds so much, and its threads; the last is known to."""
    return next((size, threads) for size, threads in sizes if length <= size)


@cache
def warp_size() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 32
    return int(triton.runtime.driver.active.get_current_target().warp_size)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
