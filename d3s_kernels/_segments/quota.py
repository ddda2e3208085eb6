"""How many values of a segment are kept: a share or a number of them, given as a number or as a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import in_a_graph, is_number, require_optional_tensors, require_whole

DOUBLE_SLACK, FLOAT_SLACK = 2.0**-50, 2.0**-21  # see keep_from_ratio in csrc/core/quota.h


class Quota(NamedTuple):
    """How many values to keep: a share, or a number. At most one of the four fields is set. The ops take all four."""

    ratio: float | None = None
    ratio_tensor: Tensor | None = None
    k: int | None = None
    k_tensor: Tensor | None = None

    def of(self, present: Tensor, *, times: int = 1, slack: float = DOUBLE_SLACK) -> Tensor:
        """How many values of each segment are kept. A tensor is read on the device; with an invalid value nothing is
        kept.

        Args:
            present: int64: how many values each segment has that may be kept.
            times: for a pool, the number of segments in it: ``k`` is for each of them.
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

    def number(self, most: int) -> int | Tensor:
        """``k``, but at most ``most``, so that products with it do not overflow."""
        if self.k_tensor is not None:
            return self.k_tensor.reshape(()).long().clamp(max=most)
        assert self.k is not None
        return min(self.k, most)


QuotaOfOp = tuple[float | None, Tensor | None, int | None, Tensor | None]
"""The fields of a :class:`Quota` as a plain tuple: making a Quota would take a twentieth of the smallest call."""


def quota_of(like: Tensor, ratio: float | Tensor | None, k: int | Tensor | None = None, name: str = "k") -> QuotaOfOp:
    """Sorts ``ratio`` and ``k`` into numbers and 0-d tensors; tensors must be on the device of ``like``. The ops check
    the values. Error messages call ``k`` by ``name``.
    """
    ratio_tensor: Tensor | None = None
    k_tensor: Tensor | None = None
    if isinstance(ratio, Tensor):
        require_optional_tensors(like, ratio=ratio)
        ratio, ratio_tensor = None, ratio
    elif ratio is not None:
        if not is_number(ratio):
            raise TypeError(f"ratio: got {type(ratio).__name__}; takes a number or a 0-d tensor")
        if torch.compiler.is_compiling():
            if not 0 < ratio <= 1:
                raise ValueError(f"ratio: got {ratio}; takes a number in (0, 1]")
            ratio_tensor, ratio = in_a_graph(ratio, like), None
    if isinstance(k, Tensor):
        require_optional_tensors(like, **{name: k})
        k, k_tensor = None, k
    elif k is not None and type(k) is not int:
        require_whole(**{name: k})
    return ratio, ratio_tensor, k, k_tensor
