"""Packs some of the rows: those that a mask keeps, or those that have a gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_op = torch.ops.d3s_kernels


class Picked(NamedTuple):
    """Some of the rows, packed in their order; without host synchronisation if the caller bounds their number."""

    indices: Tensor  # [capacity]; past the last row those of row 0
    past: Tensor | None  # bool [capacity]: the places past the last row; None where the host knows the number of rows
    exceeded: Tensor | None  # bool [1]: whether there are more than the bound; None where there is no bound

    @classmethod
    def where(cls, mask: Tensor, bound: int | None) -> Picked:
        capacity = int(mask.sum()) if bound is None else min(bound, mask.numel())
        indices, count = _op.compact.default(mask, capacity)
        if bound is None:
            return cls(indices, None, None)
        return cls(indices.clamp(min=0), indices < 0, count > bound)

    def gather(self, values: Tensor, dim: int = 0, past: float = 0) -> Tensor:
        """``values`` of these rows, and ``past`` past the last one: values there may be NaN, and must not reach a
        product.
        """
        packed = values.index_select(dim, self.indices)
        if self.past is None:
            return packed
        return packed.masked_fill_(self.past if dim == values.dim() - 1 else self.past.unsqueeze(1), past)

    def scatter(self, values: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
        """``values`` at their rows, 0 elsewhere; NaN where the bound was exceeded."""
        # One more row takes the values past the picked rows.
        places = self.indices if self.past is None else self.indices.masked_fill(self.past, rows)
        outs = (each.new_zeros((rows + 1, *each.shape[1:])).index_copy_(0, places, each)[:rows] for each in values)
        return tuple(map(self.poison_, outs))

    def unless(self, exceeded: Tensor | None) -> Picked:
        """The same, with another bound that may be exceeded."""
        if exceeded is None:
            return self
        own = self.exceeded
        return self._replace(exceeded=exceeded.view(1) if own is None else own | exceeded)

    def poison_(self, values: Tensor) -> Tensor:
        return values if self.exceeded is None else values.masked_fill_(self.exceeded, torch.nan)
