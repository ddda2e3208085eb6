"""ESPO inside TRL's unchanged loss: TRL gets inputs for which its own formulas compute ESPO's objective."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ratios import espo_terms
from .batch import Batch, loss_mask
from .config import D3SConfig


def as_espo(batch: Batch, logprob: Tensor, entropy: Tensor, args: D3SConfig, vocab_size: int) -> tuple[Batch, Tensor]:
    """Returns the fields that turn TRL's token ratios of a micro-batch into ESPO's, and an epsilon for each token.

    TRL's ratio is ``exp(logprob - old)``. With ``old = sg[logprob] - log ratio`` it equals ESPO's ratio in value and
    gradient. One difference remains: at the cap of e^10 ESPO's gradient is 0, and TRL's is not. In a loss that averages
    over each sequence ("grpo") the advantages are multiplied by weights, which turn that average into ESPO's mean over
    the sequence's groups. In the other losses all tokens of the groups have the same weight.

    Args:
        batch: the micro-batch, with old log-probabilities and entropies of the old policy if it has them.
        logprob, entropy: ``[B, T]``, from the training forward, constants. They replace the old policy's values if the
            batch has none: then the policy has not changed since.
    """
    old = batch.get("old_per_token_logps", logprob)
    terms = espo_terms(
        logprob,
        old,
        batch.get("d3s_entropy", entropy),
        loss_mask(batch).bool(),
        quantiles=args.espo_quantiles,
        alpha=args.espo_alpha,
        denominator=args.espo_denominator,
        vocab_size=vocab_size,
    )
    moved: dict[str, Any] = {"old_per_token_logps": logprob - terms.ratio.log()}
    if "sampling_per_token_logps" not in batch:  # else TRL's off-policy mask would read the new "old" ones
        moved["sampling_per_token_logps"] = old
    weight = terms.weight if args.loss_type == "grpo" else (terms.weight > 0).float()
    moved["advantages"] = batch["advantages"].unsqueeze(1) * weight
    return moved, terms.epsilon
