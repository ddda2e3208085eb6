"""ESPO inside TRL's loss, without a change to it: TRL is given the numbers from which its own formulas make ESPO's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._espo import espo_terms
from .config import D3SConfig
from .gradient import loss_mask
from .rollouts import Batch


def as_espo(batch: Batch, logprob: Tensor, entropy: Tensor, args: D3SConfig, vocab_size: int) -> tuple[Batch, Tensor]:
    """What a micro-batch has to hold so that TRL's ratios of tokens are ESPO's; and epsilon for each token.

    TRL's ratio is ``exp(logprob - old)``. With ``old = sg[logprob] - log ratio`` it is ESPO's, in value and gradient
    (but that the gradient does not end where the ratio does, at e^10). In a loss that averages over each sequence
    ("grpo") the advantages carry the weights that make it a mean over the sequence's groups, as in ESPO's objective; in
    the others every token in a group counts alike.

    Args:
        batch: the micro-batch; its old log-probabilities and its entropies of the old policy, where it has them.
        logprob, entropy: ``[B, T]``, those of the training forward, constants. They are the old policy's where the
            batch has no others: it has not moved.
    """
    old = batch.get("old_per_token_logps", logprob)
    terms = espo_terms(
        logprob,
        old,
        batch.get("d3s_entropy", entropy),
        loss_mask(batch).bool(),
        quantiles=args.espo_quantiles,
        alpha=args.espo_alpha,
        denominator=args.espo_denominator,  # type: ignore[arg-type]  # D3SConfig has checked it
        vocab_size=vocab_size,
    )
    moved: dict[str, Any] = {"old_per_token_logps": logprob - terms.ratio.log()}
    if "sampling_per_token_logps" not in batch:  # TRL's off-policy mask falls back to the old ones
        moved["sampling_per_token_logps"] = old
    weight = terms.weight if args.loss_type == "grpo" else (terms.weight > 0).float()
    moved["advantages"] = batch["advantages"].unsqueeze(1) * weight
    return moved, terms.epsilon
