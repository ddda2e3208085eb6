"""Cuts rows x vocabulary into tiles that fit the workspace. Computes the logits of a tile, and the products of the
backward.

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
from .._dispatch.backends import SLICES
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
_UNIT = 1024  # with partial sums, a tile has a multiple of this many ids
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


# ---- tiles ----------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The sizes of tiles that suit a kind of device."""

    workspace_bytes: int
    row_multiple: int  # tiles are cut at multiples of this: the number of rows in a block of the matrix product


SIZES = {
    "cpu": Sizes(workspace_bytes=32 << 20, row_multiple=1),  # the workspace takes only a part of the last-level cache
    "cuda": Sizes(workspace_bytes=512 << 20, row_multiple=128),
}
SIZES["xpu"] = SIZES["cuda"]


class Tiles(NamedTuple):
    """Tiles of rows x vocabulary. Kernels cut a row into slices. Tiles are cut only between slices, so that results are
    bitwise equal to results without tiles. No tile has both ids whose logits are kept and other ids.
    """

    rows: int
    vocabulary: int
    row_step: int
    token_step: int
    buffer: Tensor
    kept: int = 0  # the logits of the first ids, up to this id, are kept
    parts: int = 1  # the parts in which the gradient of the hidden states is summed

    @classmethod
    def cut(cls, hidden: Tensor, problem: HeadProblem, kept: int = 0, *, sums: bool | None = None) -> Tiles:
        """Cuts the tiles of the problem's vocabulary and some packed rows of its hidden states. ``sums`` says for a
        backward whether the gradient of the hidden states is computed. Its partial sums take memory of the workspace.
        """
        sizes, slice_tokens = SIZES[hidden.device.type], SLICES[hidden.device.type]
        (rows, columns), vocabulary, dtype = hidden.shape, problem.weight.shape[0], problem.logits_dtype
        elements = (problem.workspace_bytes or sizes.workspace_bytes) // dtype.itemsize
        length = whole_vectors(vocabulary, dtype)
        # A tile has as many rows as the workspace can hold for one slice. So the weight is read only a few times, and
        # if all rows fit, the weight's gradient is written only once. If not all rows fit, the rows are cut into tiles
        # of about equal height.
        fitting = max(1, elements // max(1, min(slice_tokens, length)))
        row_step = max(1, -(-rows // max(1, -(-rows // fitting))))
        if row_step < rows:
            row_step = min(fitting, -(-row_step // sizes.row_multiple) * sizes.row_multiple)
        parts, unit = 1, slice_tokens
        if sums and rows * columns and SPLITS and widens(hidden):
            of_a_part = 4 * rows * columns // dtype.itemsize
            unused = elements - row_step * min(slice_tokens, length)
            parts = parts_of(rows, columns, vocabulary, unused // of_a_part)
            if parts > 1:
                elements, unit = elements - (parts - 1) * of_a_part, _UNIT  # gradients do not depend on slices
        token_step = max(1, vocabulary)  # a shard may have no ids
        if row_step * length > elements:  # if not all ids fit: as few tiles as possible, of about equal size
            fitting_tokens = elements // row_step // unit * unit
            tiles = -(-vocabulary // max(unit, fitting_tokens))
            token_step = -(-vocabulary // (tiles * unit)) * unit
        in_place = sums is None and kept == vocabulary  # the forward writes all logits to the memory that keeps them
        room = 0 if in_place else row_step * whole_vectors(token_step, dtype)
        buffer = torch.empty(room, dtype=dtype, device=hidden.device)
        return cls(rows, vocabulary, row_step, token_step, buffer, kept, parts)

    def row_slices(self) -> Iterator[slice]:
        for begin in range(0, self.rows, self.row_step):
            yield slice(begin, min(self.rows, begin + self.row_step))

    def token_slices(self) -> Iterator[slice]:
        for first, end in ((0, self.kept), (self.kept, self.vocabulary)):
            yield from (slice(begin, min(end, begin + self.token_step)) for begin in range(first, end, self.token_step))

    def room(self, rows: slice, tokens: slice) -> Tensor:
        """Returns the memory for a tile. Each row of the tile begins at a multiple of 64 bytes."""
        height, width = rows.stop - rows.start, tokens.stop - tokens.start
        length = whole_vectors(width, self.buffer.dtype)
        return self.buffer[: height * length].view(height, length)[:, :width]


def tiles_of_logits(
    problem: HeadProblem, hidden: Tensor, kept: Tensor | None = None
) -> Iterator[tuple[slice, int, Tensor]]:
    """Computes the logits of packed rows tile by tile. Yields the rows of a tile, its first id, and its logits, which
    the next tile overwrites, unless they are written to ``kept``. The tiles of a row come in the order of the
    vocabulary.
    """
    head, tiles = Head.of(problem), Tiles.cut(hidden, problem, 0 if kept is None else kept.shape[1])
    for rows in tiles.row_slices():
        for tokens in tiles.token_slices():
            keeps = kept is not None and tokens.stop <= kept.shape[1]
            out = kept[rows, tokens] if kept is not None and keeps else tiles.room(rows, tokens)
            yield rows, problem.shard.token(tokens.start), head.logits(hidden[rows], tokens, out)


# ---- kept logits: the forward's logits of the first ids, within problem.keep_logits_bytes ---------------------------


def new_room_for_logits(problem: HeadProblem) -> Tensor:
    """Allocates the memory in which the forward keeps logits, ``[rows, logits]``; empty if it keeps none. The shape
    does not depend on the mask, whose values are unknown to a trace.
    """
    rows, budget, dtype, tokens = problem.most_rows, problem.keep_logits_bytes, problem.logits_dtype, 0
    if rows and budget and not problem.supports.given:
        fitting, unit = budget // (rows * dtype.itemsize), SLICES[problem.hidden.device.type]
        tokens = whole_vectors(problem.weight.shape[0], dtype)
        tokens = tokens if tokens <= fitting else fitting // unit * unit
    return problem.hidden.new_empty((rows if tokens else 0, tokens), dtype=dtype)


def kept_logits(problem: HeadProblem, room: Tensor) -> Tensor | None:
    """Returns the kept logits ``[rows, ids]`` in memory from :func:`new_room_for_logits`, or None if none are kept."""
    return room[:, : problem.weight.shape[0]] if room.numel() else None


def whole_vectors(elements: int, dtype: torch.dtype) -> int:
    """Rounds a number of elements up to whole units of 64 bytes, the largest unit of matrix products."""
    vector = 64 // dtype.itemsize
    return -(-elements // vector) * vector
