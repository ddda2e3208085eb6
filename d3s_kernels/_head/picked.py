"""Packs some of the rows: those that a mask keeps, or those that have a gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_op = torch.ops.d3s_kernels


class Picked(NamedTuple):
    """Some of the rows, packed in their order; without host synchronisation if the caller bounds their number."""

    indices: Tensor  # [capacity], -1 past the last row
    exceeded: Tensor | None  # bool [1]: whether there are more than the bound; None where there is no bound

    @classmethod
    def where(cls, mask: Tensor, bound: int | None) -> Picked:
        capacity = int(mask.sum()) if bound is None else min(bound, mask.numel())
        indices, count = _op.compact.default(mask, capacity)
        return cls(indices, None if bound is None else count > bound)

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of these rows, and 0 past the last one: values there may be NaN, and must not reach a product."""
        packed = values.index_select(0, self.indices.clamp(min=0))
        past = (self.indices < 0).view(-1, *[1] * (values.dim() - 1))
        return packed if self.exceeded is None else packed.masked_fill_(past, 0)

    def gather_temperatures(self, values: Tensor) -> Tensor:
        """The temperatures of these rows, and 1 past the last one, since a temperature is above 0."""
        return torch.where(self.indices < 0, 1.0, self.gather(values))

    def scatter(self, values: Tensor, rows: int) -> Tensor:
        """``values`` at their rows, 0 elsewhere; NaN where the bound was exceeded."""
        out = values.new_zeros((rows + 1, *values.shape[1:]))  # the last row takes the values past the picked rows
        out.index_copy_(0, torch.where(self.indices < 0, rows, self.indices), values)
        return self.poison_(out[:rows])

    def unless(self, exceeded: Tensor | None) -> Picked:
        """The same, with another bound that may be exceeded."""
        if exceeded is None:
            return self
        own = self.exceeded
        return self._replace(exceeded=exceeded.view(1) if own is None else own | exceeded)

    def poison_(self, values: Tensor) -> Tensor:
        return values if self.exceeded is None else values.masked_fill_(self.exceeded, torch.nan)
