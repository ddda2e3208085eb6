"""The matrix products of the LM head: the logits of a tile, and the products of the backward.

Torch computes the matrix products. On a CPU without a dot-product instruction for bfloat16 or float16, a product in
that dtype takes over ten times as long as in float32. There, the matrices are widened to float32, one piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from .._arguments.bundles import SupportArguments
from .._dispatch import backends
from .problem import HeadProblem

_op = torch.ops.d3s_kernels
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

_WIDE_BYTES = 8 << 20  # the size of a float32 piece in bytes: small enough to stay in the last-level cache
# The maximum number of terms that one matrix product sums for each element of its result. With more terms, some BLAS
# libraries lose precision. The maximum is lower for products with few rows, since these libraries then add all terms
# one by one, as they do for the last few rows of any product. Precision matters, since a gradient is a sum over the
# vocabulary, and its terms mostly cancel.
_TERMS, _TERMS_OF_FEW_ROWS, _FEW_ROWS = 8192, 1024, 64

# Products on a GPU whose terms are cut into parts. They have run on no GPU yet, so only the benchmarks switch them on.
SPLITS = False
BLOCK = 128, 256  # rows and columns that a multiprocessor computes at a time, in bfloat16
_TERM_OF_A_BLOCK = 2 * 128 * 256 / (800e12 / 132)  # seconds for one term of all sums of a block
_TERM_OF_A_SUM = 8 / 4.3e12  # seconds to write and read one partial sum
_SHALLOWEST = 2048  # terms of a part; with fewer terms, a block's begin and end take a part of its time
_ALIGNED = 8  # a part begins at a multiple of this, 16 bytes in half precision


class Head(NamedTuple):
    """The parameters of an LM head, and the dtype of its logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logits_dtype: torch.dtype

    @classmethod
    def of(cls, problem: HeadProblem) -> Head:
        return cls(problem.weight, problem.bias, problem.logit_softcap, problem.logits_dtype)

    def logits(self, hidden: Tensor, tokens: slice, out: Tensor) -> Tensor:
        weight = self.weight[tokens]
        if out.dtype == hidden.dtype and multiplies(hidden):
            if past := _read_behind_rows(hidden):
                hidden = functional.pad(hidden, (0, past))[:, : hidden.shape[1]]
            torch.mm(hidden, weight.t(), out=out)
        elif out.dtype != hidden.dtype and widens(hidden):
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        elif out.dtype != hidden.dtype and hidden.is_cpu and hidden.dtype == torch.bfloat16:
            _op.wide_product_.default(hidden, weight, out)
        else:
            wide = hidden.float()
            for begin, piece in _widened(weight, _rows_of_piece(weight.shape[1])):
                part = out[:, begin : begin + len(piece)]
                if part.dtype == torch.float32:
                    torch.mm(wide, piece.t(), out=part)
                else:
                    part.copy_(wide @ piece.t())
        if self.bias is not None:
            out.add_(self.bias[tokens])
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out

    def support_logits(
        self, hidden: Tensor, labels: Tensor, supports: SupportArguments, mask: Tensor | None, tile_start: int | None
    ) -> Tensor:
        """Computes one logit for each id of the supports, then one for each row's label."""
        logits: Tensor = _op.support_logits.default(
            hidden, self.weight, labels, *supports, self.bias, self.softcap, mask, tile_start, self.logits_dtype
        )
        return logits

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of a tile's gradient. The products of the backward are computed in this dtype."""
        return self.weight.dtype if multiplies(self.weight) else self.logits_dtype


def multiplies(values: Tensor) -> bool:
    """Returns whether torch multiplies matrices of this dtype and device about as fast as in float32, or faster."""
    return not values.is_cpu or values.dtype.itemsize > 2 or values.dtype in backends.half_products()


def zero_behind_rows_(tile: Tensor) -> None:
    """Fills the memory behind a tile's rows with zeros, as far as a product would read this memory."""
    if past := _read_behind_rows(tile):
        tile.as_strided((len(tile), past), tile.stride(), tile.storage_offset() + tile.shape[1]).zero_()


def _read_behind_rows(values: Tensor) -> int:
    """Returns the number of elements that a product reads behind the end of each row. With AMX, oneDNN multiplies whole
    blocks of 32 elements in half precision. Elements behind a row are multiplied by 0, but a NaN there still gives NaN
    (oneDNN's issue 5717).
    """
    # A tensor of another type is a fake tensor of a trace, and a trace is treated like a run on a GPU.
    reads = values.is_cpu and values.dtype.itemsize == 2 and type(values) is Tensor
    return -values.shape[1] % 32 if reads else 0


def _rows_of_piece(columns: int) -> int:
    return max(1, _WIDE_BYTES // (4 * max(1, columns)))


def _widened(values: Tensor, step: int) -> Iterator[tuple[int, Tensor]]:
    """Cuts the values into pieces of ``step`` rows. Yields for each piece the index of its first row, and the piece in
    float32. If the values are copied, each piece overwrites the previous piece.
    """
    if values.dtype == torch.float32:
        yield from ((begin, values[begin : begin + step]) for begin in range(0, len(values), step))
        return
    room = values.new_empty((min(step, len(values)), values.shape[1]), dtype=torch.float32)
    for begin in range(0, len(values), step):
        piece = values[begin : begin + step]
        yield begin, room[: len(piece)].copy_(piece)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Computes ``total += a @ b``, or ``total = a @ b`` if ``first``. On a CPU, a half-precision product is rounded
    before it is added.
    """
    if total.dtype != a.dtype and widens(a):
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    step = _TERMS_OF_FEW_ROWS if a.shape[0] < _FEW_ROWS else _TERMS
    if multiplies(b):
        if first and total.dtype == a.dtype and a.shape[1] <= step:
            torch.mm(a, b, out=total)
            return
        for begin in range(0, a.shape[1], step):
            left, right = a[:, begin : begin + step], b[begin : begin + step]
            if first and begin == 0:
                total.copy_(left @ right)
            elif total.dtype == a.dtype and not _sums_apart(a):
                total.addmm_(left, right)
            else:  # on a CPU piece by piece: with few rows, the total is the whole weight's gradient
                height = _rows_of_piece(right.shape[1]) if total.is_cpu else max(1, len(total))
                for top in range(0, len(total), height):
                    total[top : top + height].add_(left[top : top + height] @ right)
        return
    # On CPUs without fast half-precision products, the matrices are widened, one piece at a time.
    if total.dtype == torch.float32:  # a total of another dtype would be rounded after each step
        step = min(step, _rows_of_piece(b.shape[1]))
    for begin, right in _widened(b, step):
        for top, left in _widened(a[:, begin : begin + len(right)], _rows_of_piece(max(right.shape))):
            part = total[top : top + len(left)]
            if first and begin == 0:
                part.copy_(left @ right)
            else:
                part.add_(left @ right)


class PartialSums:
    """Sums of products, float32 ``[rows, columns]``, as one partial sum for each part of the terms. On a GPU, a product
    of few rows and many terms has too few blocks to keep all multiprocessors busy; in parts it has more blocks. At the
    end, the partial sums are added in a fixed order.
    """

    def __init__(self, parts: Tensor) -> None:
        self._parts = parts  # [parts, rows, columns]

    def add(self, place: slice, a: Tensor, b: Tensor, first: bool) -> None:
        """Adds ``a @ b`` to the rows in ``place``. If ``first``, these rows are overwritten."""
        sums = self._parts[:, place]
        parts, rows, columns = sums.shape
        terms = a.shape[1] // (parts * _ALIGNED) * _ALIGNED  # of each part
        if parts > 1:
            left = a[:, : parts * terms].view(rows, parts, terms).transpose(0, 1)
            right = b[: parts * terms].view(parts, terms, columns)
            beta = 0 if first else 1
            if a.dtype == sums.dtype:
                torch.baddbmm(sums, left, right, beta=beta, out=sums)
            else:
                torch.baddbmm(sums, left, right, out_dtype=sums.dtype, beta=beta, out=sums)
            a, b, first = a[:, parts * terms :], b[parts * terms :], False
        if a.shape[1] or first:
            add_product(sums[0], a, b, first)

    def total(self) -> Tensor:
        return self._parts[0] if len(self._parts) == 1 else self._parts.sum(0)


def splits(values: Tensor) -> bool:
    """Returns whether products of this dtype and device may be computed in parts."""
    return SPLITS and widens(values)


def parts_of(rows: int, columns: int, terms: int, room: int) -> int:
    """Returns into how many parts the terms of a product are cut. The number depends only on the product's shape and on
    ``room``, the number of partial sums of one part that there is memory for, so equal products have equal bits.

    A multiprocessor computes a block at a time. If 56 blocks are given to 132 multiprocessors, 76 of these do nothing.
    Parts make more blocks, but their partial sums are written and read. The numbers are those of an H100, and of GPUs
    with 132 and with 148 multiprocessors.
    """
    blocks = -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])

    def seconds(parts: int) -> float:
        waves = sum(-(-blocks * parts // processors) for processors in (132, 148)) / 2
        return waves * terms / parts * _TERM_OF_A_BLOCK + (parts - 1) * rows * columns * _TERM_OF_A_SUM

    most = max(1, min(1 + room, terms // _SHALLOWEST))
    possible = [parts for parts in (1, 2, 4, 8, 16, 32, 64) if parts <= most]
    fastest = min(map(seconds, possible))
    return next(parts for parts in possible if seconds(parts) <= 1.03 * fastest)  # fewer parts take less memory


def _sums_apart(values: Tensor) -> bool:
    """Returns whether a product must be computed separately, before it is added to a total. Some BLAS libraries for
    CPUs would add each term to the total, and lose a digit or two over a whole vocabulary.
    """
    return values.is_cpu


def widens(values: Tensor) -> bool:
    """Returns whether torch can multiply half-precision matrices with a float32 result on this device."""
    return values.is_cuda and torch.version.cuda is not None


def without_autocast(function: _Kernel) -> _Kernel:
    """Disables torch.autocast in a function, so that products keep the precision of their arguments."""

    @wraps(function)
    def run(problem: Any, *arguments: Any, **options: Any) -> Any:
        device = problem.hidden.device.type
        if not torch.is_autocast_enabled(device):  # entering and leaving autocast takes 10 us
            return function(problem, *arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(problem, *arguments, **options)

    return cast(_Kernel, run)
