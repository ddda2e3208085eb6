"""Cuts rows x vocabulary into tiles whose logits fit the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch.backends import SLICES
from .products import Head


class Sizes(NamedTuple):
    """The sizes of tiles that suit a kind of device."""

    workspace_bytes: int
    row_multiple: int  # the height of the blocks that a matrix product works in


SIZES = {
    "cpu": Sizes(workspace_bytes=32 << 20, row_multiple=1),  # a share of the last-level cache
    "cuda": Sizes(workspace_bytes=512 << 20, row_multiple=128),
}
SIZES["xpu"] = SIZES["cuda"]


class Tiles(NamedTuple):
    """Tiles whose edges are edges of the slices into which kernels cut a row, so that results keep their bits."""

    rows: int
    vocabulary: int
    row_step: int
    token_step: int
    buffer: Tensor

    @classmethod
    def cut(cls, hidden: Tensor, head: Head, workspace_bytes: int | None) -> Tiles:
        sizes, slice_tokens = SIZES[hidden.device.type], SLICES[hidden.device.type]
        rows, vocabulary = hidden.shape[0], head.weight.shape[0]
        elements = (workspace_bytes or sizes.workspace_bytes) // head.logits_dtype.itemsize
        length = whole_vectors(vocabulary, head.logits_dtype)
        # As many rows as fit beside one slice of tokens: the weight is then read seldom, and where all rows fit, its
        # gradient is written once. More rows than that are cut into tiles of about the same height.
        fitting = max(1, elements // max(1, min(slice_tokens, length)))
        row_step = max(1, -(-rows // max(1, -(-rows // fitting))))
        if row_step < rows:
            row_step = min(fitting, -(-row_step // sizes.row_multiple) * sizes.row_multiple)
        token_step = max(1, vocabulary)  # a shard may have none
        if row_step * length > elements:  # as few tiles as fit, of about the same size
            fitting_tokens = elements // row_step // slice_tokens * slice_tokens
            tiles = -(-vocabulary // max(slice_tokens, fitting_tokens))
            token_step = -(-vocabulary // (tiles * slice_tokens)) * slice_tokens
        room = row_step * whole_vectors(token_step, head.logits_dtype)
        buffer = torch.empty(room, dtype=head.logits_dtype, device=hidden.device)
        return cls(rows, vocabulary, row_step, token_step, buffer)

    def row_slices(self) -> Iterator[slice]:
        for begin in range(0, self.rows, self.row_step):
            yield slice(begin, min(self.rows, begin + self.row_step))

    def token_slices(self) -> Iterator[slice]:
        for begin in range(0, self.vocabulary, self.token_step):
            yield slice(begin, min(self.vocabulary, begin + self.token_step))

    def room(self, rows: slice, tokens: slice) -> Tensor:
        """The memory of a tile. Its rows begin at multiples of 16 bytes."""
        height, width = rows.stop - rows.start, tokens.stop - tokens.start
        length = whole_vectors(width, self.buffer.dtype)
        return self.buffer[: height * length].view(height, length)[:, :width]


def whole_vectors(elements: int, dtype: torch.dtype) -> int:
    """Elements of the vectors of 16 bytes that hold so many: matrix products and kernels on GPUs work in these."""
    vector = 16 // dtype.itemsize
    return -(-elements // vector) * vector


def of_rows(values: Tensor | None, rows: slice) -> Tensor | None:
    """``values`` of these rows; a 0-d tensor stands for all."""
    return values if values is None or values.dim() == 0 else values[rows]
