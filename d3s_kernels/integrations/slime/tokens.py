"""The choice of tokens in a packed micro-batch of Megatron's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...distributed import vocab_parallel_logprob_entropy
from ...vocabulary import entropy
from .._megatron import Ranks
from .options import D3SOptions


def require_layout(args: Any, logits: Tensor, options: D3SOptions, ranks: Ranks) -> None:
    """Raises a ValueError for a run whose tokens cannot be chosen; the message names the option."""
    if args.advantage_estimator == "gspo":
        raise ValueError(
            "advantage_estimator: got 'gspo', whose ratio is that of a whole sequence: a dropped token would keep a "
            "gradient; takes an estimator with a ratio for each token"
        )
    if ranks.context_parallel > 1:
        raise ValueError(
            f"context_parallel_size: got {ranks.context_parallel}; takes 1, because a rank has parts of responses"
        )
    if ranks.tensor_parallel is not None and options.token_rule == "random":
        raise ValueError(
            "d3s_token_rule: got 'random' with tensor parallelism; takes another rule, because ranks that share the "
            "vocabulary would draw different tokens"
        )
    layout = getattr(args, "qkv_format", "thd")  # an option of miles
    if layout != "thd" or logits.dim() != 3 or len(logits) != 1:
        raise ValueError(f"qkv_format: got {layout!r} and logits of shape {list(logits.shape)}; takes 'thd', [1, T, V]")


def response_entropies(logits: Tensor, batch: dict[str, Any], temperature: float, ranks: Ranks) -> Tensor:
    """The entropy of the policy at each token of the responses, one after the other.

    Args:
        logits: ``[T, V]``, or this rank's columns of them; prompts, responses and padding in one row.
        batch: ``total_lengths`` and ``response_lengths``, numbers for each sample.

    Returns:
        float32 ``[response tokens]``, the same on all ranks that share the vocabulary; no gradient.
    """
    ends = torch.tensor(batch["total_lengths"]).cumsum(0).tolist()
    # The logits at a position predict the next token: hence the shift by one.
    spans = [(end - length - 1, end - 1) for end, length in zip(ends, batch["response_lengths"], strict=True)]
    rows = torch.cat([torch.arange(*span) for span in spans]).to(logits.device)
    mask = torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_fill(0, rows, True)
    logits = logits.detach()
    if ranks.tensor_parallel is None:
        return entropy(logits, temperature=temperature, mask=mask)[rows]
    labels = torch.full_like(mask, -100, dtype=torch.int64)  # the log-probabilities are not needed
    _, found = vocab_parallel_logprob_entropy(
        logits, labels, ranks.tensor_rank * logits.shape[-1], ranks.tensor_parallel, temperature=temperature, mask=mask
    )
    return found[rows]


def chosen_tokens(
    args: Any, batch: dict[str, Any], logits: Tensor, options: D3SOptions, ratio: float, ranks: Ranks
) -> Tensor:
    """bool ``[response tokens]``: the tokens that keep their advantage."""
    temperature = args.rollout_temperature or 1.0  # both trainers take 0, greedy sampling, in evaluation alone
    lengths = torch.tensor([0, *batch["response_lengths"]], device=logits.device)
    return options.chosen_tokens(
        response_entropies(logits[0], batch, temperature, ranks),
        torch.cat(batch["advantages"]),
        ratio,
        torch.cat(batch["loss_masks"]),
        offsets=lengths.cumsum(0),
        data_parallel=ranks.data_parallel,
    )
