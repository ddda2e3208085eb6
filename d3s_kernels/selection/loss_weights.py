"""Factors for the gradient of a loss. They turn a mean over all tokens into a mean over the kept tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# For each type of loss (TRL's names), the denominator of the sum over the tokens.
DENOMINATORS = {
    "grpo": "sequence",  # the number of tokens of each sequence, and then the number of sequences
    "sapo": "sequence",
    "bnpo": "process",  # the number of tokens in this process's micro-batch
    "dr_grpo": "constant",
    "dapo": "generation",  # the number of tokens in the generation batch of all processes
    "cispo": "generation",
    "vespo": "generation",
    "luspo": "sequences",  # the number of sequences, whatever their lengths
}


def only_through(kept: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a backward hook for an input of the loss. The hook multiplies the gradient of kept tokens by ``weight``,
    and sets the gradient of all other tokens to 0. The gradient keeps its dtype.
    """
    return lambda gradient: torch.where(kept, gradient * weight, 0.0).to(gradient.dtype)


def gradient_weights(loss_type: str, kept: Tensor, mask: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors that turn the means of a loss over all tokens into means over the kept tokens.

    Args:
        loss_type: one of ``DENOMINATORS``.
        kept, mask: bool ``[B, T]``: the kept and the valid tokens of this process's micro-batch.
        totals: float ``[2]``: the number of kept tokens and the number of all tokens, over all processes. Used only for
            the types of loss that divide by the number of tokens of all processes, or by a constant. If tokens were
            chosen from the whole generation batch, pass the numbers of that batch, so that the factor does not depend
            on the split into micro-batches. Otherwise pass the numbers of the current micro-batches.

    Returns:
        Two factors: the first for the gradient of the loss, 0-d or ``[B, 1]``; the second for the gradient of an
        entropy bonus, 0-d. The entropy bonus is a mean over the tokens of this process's micro-batch.

    Raises:
        ValueError: an unknown type of loss.

    Example:
        >>> import torch
        >>> from d3s_kernels.selection.loss_weights import gradient_weights, only_through
        >>> logprob, mask = torch.zeros(1, 4, requires_grad=True), torch.ones(1, 4, dtype=torch.bool)
        >>> kept = torch.tensor([[True, False, False, True]])
        >>> weight, _ = gradient_weights("dapo", kept, mask, torch.tensor([2.0, 4.0]))
        >>> hooked = logprob * 1
        >>> _ = hooked.register_hook(only_through(kept, weight))
        >>> hooked.mean().backward()
        >>> logprob.grad  # of the mean over the two kept tokens
        tensor([[0.5000, 0.0000, 0.0000, 0.5000]])
    """
    if loss_type not in DENOMINATORS:
        raise ValueError(f"loss_type: got {loss_type!r}; takes {' or '.join(map(repr, sorted(DENOMINATORS)))}")
    kept_count, count = kept.sum(dim=1, keepdim=True).float(), mask.sum(dim=1, keepdim=True).float()
    bonus = policy = count.sum() / kept_count.sum().clamp(min=1)
    denominator = DENOMINATORS[loss_type]
    if denominator == "sequence":
        policy = count / kept_count.clamp(min=1)
    elif denominator == "sequences":
        policy = torch.ones_like(bonus)
    elif denominator in ("generation", "constant"):
        policy = totals[1] / totals[0].clamp(min=1)
    return policy, bonus
