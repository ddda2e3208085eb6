"""compact: where the true values of a mask are, in a tensor of a size known beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from .._segments.segments import flags


def compact(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    found = flags(mask)
    numbers = torch.arange(1, capacity + 1, device=mask.device)
    indices = torch.searchsorted(found.cumsum(0), numbers)  # the first place up to which there are so many
    return torch.where(indices < found.shape[0], indices, -1), found.sum().reshape(1)
