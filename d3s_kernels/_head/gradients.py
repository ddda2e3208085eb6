"""The gradients of hidden states, weight and bias, to which the tiles of the backward add."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .products import Head, add_product
from .tiles import Tiles


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients:
    """What is not wanted takes no memory.

    The weight's gradient is written to memory of its own, or added to ``weight_grad_into``. Where several tiles of rows
    add to it, the sum is made in float32: in its place where that is float32, else in a buffer for one slab of tokens.
    """

    def __init__(self, rows: Tensor, head: Head, tiles: Tiles, wanted: Wanted, weight_grad_into: Tensor | None) -> None:
        self._head, self._into, weight = head, weight_grad_into, head.weight
        # Without a tile nothing is written, and the gradients are 0.
        fresh = torch.empty_like if rows.numel() and weight.numel() else torch.zeros_like
        self._hidden = fresh(rows, dtype=torch.float32) if wanted.hidden else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if wanted.bias else None
        self._weight: Tensor | None = None
        if wanted.weight:
            own = weight_grad_into is None
            self._weight = fresh(weight, memory_format=torch.contiguous_format) if own else weight_grad_into
        self._slab: Tensor | None = None
        if self._weight is not None and len(rows) > tiles.row_step and self._weight.dtype != torch.float32:
            self._slab = weight.new_empty((tiles.token_step, weight.shape[1]), dtype=torch.float32)

    def add(self, tile: Tensor, rows: Tensor, place: slice, tokens: slice) -> None:
        """Adds what a tile contributes. The tiles of a slab of tokens come one after the other, first rows first."""
        if self._bias is not None:
            self._bias[tokens].add_(tile.sum(0, dtype=torch.float32))
        if self._hidden is not None:
            add_product(self._hidden[place], tile, self._head.weight[tokens], first=tokens.start == 0)
        if self._slab is not None:
            add_product(self._slab[: tile.shape[1]], tile.t(), rows, first=place.start == 0)
        elif self._weight is not None:
            add_product(self._weight[tokens], tile.t(), rows, first=place.start == 0 and self._into is None)

    def finish(self, tokens: slice) -> None:
        """All tiles of a slab of tokens are there."""
        if self._slab is None or self._weight is None:
            return
        total = self._slab[: tokens.stop - tokens.start]
        if self._into is None:
            self._weight[tokens] = total
        else:
            self._weight[tokens].add_(total)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the rows in float32, and those of weight and bias in the weight's dtype; empty if there is
        none to return.
        """
        weight = self._head.weight
        return (
            weight.new_empty(0, dtype=torch.float32) if self._hidden is None else self._hidden,
            weight.new_empty(0) if self._weight is None or self._into is not None else self._weight,
            weight.new_empty(0) if self._bias is None else self._bias.to(weight.dtype),
        )
