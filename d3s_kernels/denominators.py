"""Means over the kept tokens of losses whose value stays the mean over all tokens: factors for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# What a loss of each type, in the names of TRL, divides the sum over its tokens by.
DENOMINATORS = {
    "grpo": "sequence",  # each sequence's tokens, and the sequences
    "sapo": "sequence",
    "bnpo": "process",  # the tokens of this process's micro-batch
    "dr_grpo": "constant",
    "dapo": "generation",  # the tokens of the generation batch of all processes
    "cispo": "generation",
    "vespo": "generation",
    "luspo": "sequences",  # their number, whatever their lengths
}


def only_through(kept: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A backward hook for a loss's input: multiplies the gradient of kept tokens by ``weight``, sets others to 0."""
    return lambda gradient: torch.where(kept, gradient * weight, 0.0)


def gradient_weights(
    loss_type: str, kept: Tensor, mask: Tensor, batch: Mapping[str, Any], totals: Tensor
) -> tuple[Tensor, Tensor]:
    """The factors that turn a loss's means over all tokens into means over the kept tokens, by its type.

    Args:
        kept, mask: bool ``[B, T]``: the kept and the valid tokens of this process's micro-batch.
        batch: the micro-batch. If tokens were chosen for the whole generation batch, it has their counts over all
            processes.
        totals: float ``[2]``: the numbers of kept and of all tokens in the micro-batches of all processes.

    Returns:
        The weight of the loss's gradient, 0-d or ``[B, 1]``, and that of the entropy bonus's gradient, 0-d.
    """
    of_kept, of_all = kept.sum(dim=1, keepdim=True).float(), mask.sum(dim=1, keepdim=True).float()
    of_process = of_all.sum() / of_kept.sum().clamp(min=1)
    denominator = DENOMINATORS[loss_type]
    if denominator == "sequence":
        return of_all / of_kept.clamp(min=1), of_process
    if denominator == "process":
        return of_process, of_process
    if denominator == "sequences":
        return torch.ones_like(of_process), of_process
    if "d3s_tokens_kept" in batch:  # all micro-batches get the same weight, so it does not matter how they were split
        return batch["num_items_in_batch"] / batch["d3s_tokens_kept"].clamp(min=1), of_process
    return totals[1] / totals[0].clamp(min=1), of_process  # micro-batch by micro-batch, of all processes
