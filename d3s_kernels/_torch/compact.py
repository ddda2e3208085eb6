"""The op compact: returns the indices of a mask's true values, in a tensor whose size does not depend on the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from .._segments.segments import flags
from .kernels import op


def _fake(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    return mask.new_empty((capacity,), dtype=torch.int64), mask.new_empty((1,), dtype=torch.int64)


@op(_fake)
def compact(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    kept = flags(mask)
    numbers = torch.arange(1, capacity + 1, device=mask.device)
    indices = torch.searchsorted(kept.cumsum(0), numbers)  # indices[i]: where the (i + 1)-th true value is
    return torch.where(indices < kept.shape[0], indices, -1), kept.sum().reshape(1)
