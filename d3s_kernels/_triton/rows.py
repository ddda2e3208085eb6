"""The layout of rows of logits in memory, and the rows' temperatures, as arguments of kernels."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .._arguments.bundles import NumberOrTensor

# Triton does not compile special variants for the values of these arguments of row_start, since strides change with the
# length of a batch. STEP already tells Triton how the strides are aligned.
PLACE = ("inner", "outer_stride", "inner_stride")
MOST_COLUMNS = 2**31 - 2**17  # so that indices fit in an int32, even in a block that ends after the end of the row


class Rows(NamedTuple):
    """Rows of logits, with two leading dimensions, [outer, inner]."""

    tensor: Tensor
    total: int
    columns: int
    inner: int
    outer_stride: int
    inner_stride: int
    vector: int  # elements in 16 bytes
    aligned: bool  # whether every row begins at a multiple of 16 bytes, so that a lane needs one load for its elements

    @classmethod
    def of(cls, logits: Tensor) -> Rows:
        steps = _steps(logits)
        if len(steps) > 2:  # the kernels take at most two steps; the copy costs a pass over the logits
            logits = logits.contiguous()
            steps = _steps(logits)
        (_, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(steps)) + steps
        columns = logits.shape[-1]
        if columns > MOST_COLUMNS:
            raise ValueError(f"logits: got rows of {columns} tokens; takes fewer than 2^31 on a GPU")
        vector = 16 // logits.element_size()
        aligned = logits.data_ptr() % 16 == 0 and outer_stride % vector == 0 and inner_stride % vector == 0
        total = math.prod(logits.shape[:-1])
        return cls(logits, total, columns, inner, outer_stride, inner_stride, vector, aligned)

    def place(self, name: str = "logits", prefix: str = "") -> dict[str, Any]:
        """Returns the arguments of ``row_start``. The unit of strides is STEP, so that Triton knows their alignment."""
        step = self.vector if self.aligned else 1
        return {
            name: self.tensor,
            f"{prefix}inner": self.inner,
            f"{prefix}outer_stride": self.outer_stride // step,
            f"{prefix}inner_stride": self.inner_stride // step,
            f"{prefix.upper()}STEP": step,
        }


def _steps(logits: Tensor) -> list[tuple[int, int]]:
    """Returns (size, stride) of each leading dimension, after merging neighbours that one stride can describe."""
    steps: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if steps and steps[-1][1] == size * stride:
            steps[-1] = steps[-1][0] * size, stride
        else:
            steps.append((size, stride))
    return steps


@triton.jit
def row_start(logits, row, inner, outer_stride, inner_stride, STEP: tl.constexpr):
    """Returns the address of a row. ``row`` is int64 and is the first factor, since int32 products might overflow."""
    return logits + (row // inner) * outer_stride * STEP + (row % inner) * inner_stride * STEP


def temperature_arguments(temperature: NumberOrTensor) -> dict[str, Any]:
    """Returns the kernel arguments for the temperature. A Python number is passed as the bits of a float32, since
    Inductor would pass a float as a float64.
    """
    number, tensor = temperature
    (bits,) = struct.unpack("i", struct.pack("f", number))
    if tensor is None:
        return {"temperatures": None, "temperature_bits": bits, "PER_ROW": False}
    return {"temperatures": tensor.contiguous(), "temperature_bits": bits, "PER_ROW": tensor.dim() > 0}


@triton.jit
def temperature_of(row, temperatures, bits, PER_ROW: tl.constexpr):
    """Returns the temperature of each row, or NaN if it is invalid, so that the results of the row are NaN."""
    if temperatures is None:
        return (bits + 0 * row).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        t = tl.load(temperatures + (row if PER_ROW else 0 * row))
        return tl.where((t > 0.999e-15) & (t < 1.001e15), t, float("nan"))
