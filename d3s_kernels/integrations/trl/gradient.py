"""Gradient through the kept tokens alone, without a change to the loss that TRL computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .rollouts import Batch


def loss_mask(batch: Batch) -> Tensor:
    """TRL's: the completion's tokens, without those of tools."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def only_through(kept: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook for what a loss is computed from: kept tokens get their gradient, weighted; others exactly 0."""
    return lambda gradient: torch.where(kept, gradient * weight, 0.0)


def gradient_weights(loss_type: str, kept: Tensor, mask: Tensor, batch: Batch, totals: Tensor) -> tuple[Tensor, Tensor]:
    """What turns TRL's means over all tokens into means over the kept ones, by loss type.

    Args:
        kept, mask: bool ``[B, T]``: the kept and the valid tokens of this process's micro-batch.
        batch: for its counts over the generation batch of all processes, where tokens were chosen there.
        totals: float ``[2]``: tokens kept, and all, in the micro-batch of all processes.

    Returns:
        Weights of the loss's gradient, 0-d or ``[B, 1]``, and of the entropy bonus's, 0-d.
    """
    of_kept, of_all = kept.sum(dim=1, keepdim=True).float(), mask.sum(dim=1, keepdim=True).float()
    of_process = of_all.sum() / of_kept.sum().clamp(min=1)
    if loss_type in ("grpo", "sapo"):  # a mean over each sequence
        return of_all / of_kept.clamp(min=1), of_process
    if loss_type == "bnpo":  # over this process's micro-batch
        return of_process, of_process
    if loss_type == "luspo":  # a sum
        return torch.ones_like(of_process), of_process
    if loss_type != "dr_grpo" and "d3s_tokens_kept" in batch:  # over the generation batch of all processes
        return batch["num_items_in_batch"] / batch["d3s_tokens_kept"].clamp(min=1), of_process
    return totals[1] / totals[0].clamp(min=1), of_process  # micro-batch by micro-batch, of all processes
