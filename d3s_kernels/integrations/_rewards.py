"""Combines the rewards of several functions, for trainers that are built on transformers' ``Trainer``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rollouts import groups_without_spread


def total_rewards(of_each_function: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over functions of rewards ``[rollouts, functions]``. NaN means no reward; all NaN gives NaN."""
    total = (of_each_function * weights.to(of_each_function.device)).nansum(dim=1)
    return total.masked_fill(of_each_function.isnan().all(dim=1), torch.nan)


def without_spread(of_each_function: Tensor, weights: Tensor, n: int, separately: bool) -> Tensor:
    """Marks the groups of ``n`` rollouts whose rewards are all equal: bool ``[groups]``. If advantages are computed
    ``separately`` for each function, the rewards of every function must be equal.
    """
    if separately:
        return groups_without_spread(of_each_function.view(-1, n, of_each_function.shape[1]).transpose(1, 2)).all(dim=1)
    return groups_without_spread(total_rewards(of_each_function, weights).view(-1, n))
