"""Cuts rows x vocabulary into tiles that fit the workspace, computes their logits, and keeps logits for a backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch.backends import SLICES
from .problem import HeadProblem
from .products import Head, parts_of, splits

_UNIT = 1024  # with partial sums, a tile has a multiple of this many ids


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
    """Tiles of rows x vocabulary. Kernels cut a row into slices. A forward's tiles are cut only between slices, so that
    results are bitwise equal to results without tiles. No tile has both ids whose logits are kept and other ids.
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
        if sums and rows * columns and splits(hidden):
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
    hidden, budget, dtype = problem.hidden, problem.keep_logits_bytes, problem.logits_dtype
    if not budget or problem.supports.given:  # first, since a trace may not compare a number of rows
        return hidden.new_empty((0, 0), dtype=dtype)
    rows, tokens = problem.most_rows, whole_vectors(problem.weight.shape[0], dtype)
    fitting, unit = budget // (max(rows, 1) * dtype.itemsize), SLICES[hidden.device.type]
    return hidden.new_empty((rows, tokens if tokens <= fitting else fitting // unit * unit), dtype=dtype)


def kept_logits(problem: HeadProblem, room: Tensor) -> Tensor | None:
    """Returns the kept logits ``[rows, ids]`` in memory from :func:`new_room_for_logits`, or None if none are kept."""
    return room[:, : problem.weight.shape[0]] if room.numel() else None


def whole_vectors(elements: int, dtype: torch.dtype) -> int:
    """Rounds a number of elements up to whole units of 64 bytes, the largest unit of matrix products."""
    vector = 64 // dtype.itemsize
    return -(-elements // vector) * vector
