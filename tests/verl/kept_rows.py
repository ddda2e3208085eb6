"""The rows that a choice keeps, as verl's trainer takes them."""

from typing import Any

import torch
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.selection import choose_rollouts


def rollout_advantages(rewards: Tensor, groups: Any, scale: str = "group") -> Tensor:
    """GRPO's advantages with verl's eps, of groups that are sorted before."""
    names = list(dict.fromkeys(groups))
    label = torch.tensor([names.index(group) for group in groups])
    order, offsets = label.argsort(stable=True), torch.tensor([0, *label.bincount().tolist()]).cumsum(0)
    advantages = torch.empty(len(rewards))
    advantages[order] = d3s.group_advantages(rewards[order], offsets=offsets, scale=scale, eps=1e-6)
    return advantages.masked_fill(rewards.isnan(), torch.nan)


def choose_rows(advantages: Tensor, groups: Any, keep: int, **options: Any) -> Tensor:
    return choose_rollouts(advantages, keep, groups=groups, **options).nonzero().flatten()
