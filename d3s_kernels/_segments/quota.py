"""How many values of a segment are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DOUBLE_SLACK, FLOAT_SLACK = 2.0**-50, 2.0**-21  # see keep_from_ratio in csrc/core/quota.h


class Quota(NamedTuple):
    """A share of what is there, or a number: exactly one of the four is given, as the ops take them."""

    ratio: float | None = None
    ratio_tensor: Tensor | None = None
    k: int | None = None
    k_tensor: Tensor | None = None

    def of(self, present: Tensor, *, times: int = 1, slack: float = DOUBLE_SLACK) -> Tensor:
        """How many of each segment, in which so many are present. A tensor is read on the device, and if its value is
        none that is taken, nothing is kept.

        Args:
            present: int64, for each segment.
            times: of a pool, the number is for each of so many segments.
            slack: how much a product with ``ratio`` may be too large by rounding.
        """
        if self.k is not None:
            return torch.minimum(present.clamp(max=self.k).clamp(min=0) * times, present)
        if self.k_tensor is not None:
            return torch.minimum(torch.minimum(present, self.k_tensor.reshape(())).clamp(min=0) * times, present)
        if self.ratio_tensor is not None:
            slack = DOUBLE_SLACK if self.ratio_tensor.dtype == torch.float64 else FLOAT_SLACK
        ratio = self.ratio if self.ratio_tensor is None else self.ratio_tensor.reshape(()).double()
        assert ratio is not None
        wanted = (present.double() * ratio * (1 - slack)).ceil().clamp(min=1)
        good = (ratio > 0) & (ratio <= 1)
        return torch.minimum(torch.where(wanted.isnan(), 0, wanted).long(), present) * good
