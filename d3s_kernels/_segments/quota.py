"""The quota of a segment: how many of its values are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DOUBLE_SLACK, FLOAT_SLACK = 2.0**-50, 2.0**-21  # see keep_from_ratio in csrc/core/quota.h


class Quota(NamedTuple):
    """A share (``ratio``) or a count (``k``) of values to keep. Exactly one of the four fields is set."""

    ratio: float | None = None
    ratio_tensor: Tensor | None = None
    k: int | None = None
    k_tensor: Tensor | None = None

    def of(self, present: Tensor, *, times: int = 1, slack: float = DOUBLE_SLACK) -> Tensor:
        """Returns how many values of each segment are kept: 0 if ``ratio`` or ``k`` is a tensor with an invalid value.

        Args:
            present: the number of candidate values in each segment, int64.
            times: if values are pooled, the number of segments in the pool: ``k`` is multiplied by this number.
            slack: the relative rounding error by which a product with ``ratio`` may be too large.
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
