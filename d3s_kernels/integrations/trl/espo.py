"""ESPO's objective as fields of a batch, from which TRL's unchanged loss computes it."""

from __future__ import annotations

from torch import Tensor

from ...off_policy.importance_ratio import espo_terms
from .batch import Batch, loss_mask
from .config import D3SConfig
from .step import OLD


def as_espo(batch: Batch, logprob: Tensor, entropy: Tensor, args: D3SConfig, vocab_size: int) -> tuple[Batch, Tensor]:
    """Returns the fields with which TRL's unchanged loss computes ESPO's objective, and an epsilon for each token.

    TRL's ratio is ``exp(logprob - old)``. With ``old = sg[logprob] - log ratio``, where sg stops the gradient, TRL's
    ratio equals ESPO's ratio in value and gradient. The only exception is the cap of e^10: there, ESPO's gradient is 0,
    but TRL's is not. The loss "grpo" averages over the tokens of each sequence; weights on the advantages turn this
    average into ESPO's mean over groups. In the other losses, all tokens that belong to a group have the same weight.

    ``logprob`` and ``entropy``, ``[B, T]``, are constants from the training forward. If the batch has no values of the
    old policy, these constants are used instead, since the policy has not changed yet.
    """
    old = batch.get(OLD, logprob)
    terms = espo_terms(
        logprob, old, batch.get("d3s_entropy", entropy), loss_mask(batch).bool(), quantiles=args.espo_quantiles,
        alpha=args.espo_alpha, denominator=args.espo_denominator, vocab_size=vocab_size,
    )  # fmt: skip
    weight = terms.weight if args.loss_type == "grpo" else (terms.weight > 0).float()
    changed = {OLD: logprob - terms.ratio.log(), "advantages": batch["advantages"].unsqueeze(1) * weight}
    if "sampling_per_token_logps" not in batch:  # otherwise TRL's off-policy mask would read the changed "old" values
        changed["sampling_per_token_logps"] = old
    return changed, terms.epsilon
