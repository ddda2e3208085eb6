"""Importance ratios as trainers compute them, and ESPO's parts in plain PyTorch, since no trainer has these parts.

Masks are int64, as in TRL and verl. The formulas are from TRL 1.16 (`GRPOTrainer._compute_loss`) and verl 0.9
(`compute_policy_loss_vanilla`, `compute_policy_loss_gspo`).
"""

import math

import torch
from torch import Tensor


def trl_token(logprob: Tensor, old: Tensor) -> Tensor:
    return torch.exp(logprob - old)


def verl_token(logprob: Tensor, old: Tensor) -> Tensor:
    return torch.exp(torch.clamp(logprob - old, min=-20.0, max=20.0))


def trl_sequence(logprob: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """One ratio for each sequence."""
    log_ratio = logprob - old
    return torch.exp(((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1))


def verl_sequence(logprob: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    lengths = torch.sum(mask, dim=-1).clamp(min=1)
    mean = torch.sum((logprob - old) * mask, dim=-1) / lengths
    log_ratio = logprob - logprob.detach() + mean.detach().unsqueeze(-1)
    return torch.exp(torch.clamp(log_ratio, max=10.0))


def group_means(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """The mean of each token's group within its sequence; 0 for a token in no group."""
    means = torch.zeros_like(values)
    for group in range(count):
        members = groups == group
        mean = (values * members).sum(-1, keepdim=True) / members.sum(-1, keepdim=True).clamp(min=1)
        means = torch.where(members, mean, means)
    return means


def espo_ratio(logprob: Tensor, old: Tensor, groups: Tensor, count: int) -> Tensor:
    means = group_means(logprob - old, groups, count)
    return torch.exp(torch.clamp(logprob - logprob.detach() + means.detach(), max=10.0))


def espo_groups(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    limit = entropy.masked_fill(mask == 0, torch.nan).nanquantile(quantile, dim=-1, keepdim=True)
    return (entropy >= limit).to(torch.int8).masked_fill(mask == 0, -1)


def espo_clip(entropy: Tensor, groups: Tensor, count: int, vocabulary: int) -> Tensor:
    return 0.02 / math.log(vocabulary) * group_means(entropy, groups, count)
