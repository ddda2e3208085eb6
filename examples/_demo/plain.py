"""The gradient that an update should have had, in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROWS = 8  # per forward, since the logits of all rows together would need much memory


def gradient(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """The gradient of minus the mean of advantage * log-probability over the kept tokens of a batch.

    GRPO's loss over the kept tokens has this gradient: in the first update after a generation, all ratios are 1.
    """
    kept, advantages = batch["d3s_kept"], batch["advantages"]
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = kept.shape[1]
    model.zero_grad(set_to_none=True)
    for rows in kept.any(dim=1).nonzero()[:, 0].split(ROWS):
        logits = model(input_ids=tokens[rows], attention_mask=attention[rows], logits_to_keep=length + 1).logits
        logprob = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[rows, -length:, None])[..., 0]
        (-(advantages[rows, None] * logprob)[kept[rows]].sum() / kept.sum()).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def relative_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The norm of the difference of two gradients of the whole model, over the norm of the second."""
    difference = math.hypot(*(float(torch.dist(a, b)) for a, b in zip(ours, theirs, strict=True)))
    return difference / math.hypot(*(float(b.norm()) for b in theirs))
