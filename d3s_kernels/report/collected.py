"""Collects the rollouts of a step for a page, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .text import decoder, token_texts


class CollectedRollouts:
    """The rollouts that a page shows, each under its index in the step's batch. Tensors are on the CPU."""

    def __init__(self) -> None:
        self.generated: dict[int, tuple[Sequence[int], Sequence[int], Tensor, float]] = {}
        self.trained: dict[int, tuple[Tensor, Tensor, float]] = {}

    def add_generated(
        self, place: int, prompt: Sequence[int], completion: Sequence[int], counts: Tensor, advantage: float
    ) -> None:
        """Adds a generated rollout, whether or not it will be dropped: its token ids, whether each token is in the
        loss, and its advantage.
        """
        self.generated[place] = prompt, completion, counts, advantage

    def add_trained(self, place: int, kept: Tensor, entropy: Tensor, advantage: float) -> None:
        """Adds the results for a rollout that is trained on: the mask of its kept tokens, the entropies of all its
        tokens (NaN for an entropy that was not computed), and the advantage that it is trained with.
        """
        self.trained[place] = kept, entropy, advantage

    def arguments(self, group: int, tokenizer: Any) -> dict[str, Any]:
        """Returns the arguments of :func:`d3s_kernels.selection_page` that describe the collected rollouts. ``group``
        is the number of rollouts per prompt.
        """
        places = sorted(self.generated)
        rollouts = [self.generated[place] for place in places]
        prompts, completions, masks, advantages = (list(column) for column in zip(*rollouts, strict=True))
        mask = pad_sequence(masks, batch_first=True)
        kept, entropy = torch.zeros_like(mask), torch.zeros(mask.shape)
        for row, place in enumerate(places):
            if place in self.trained:
                kept_tokens, entropies, advantage = self.trained[place]
                width = min(mask.shape[1], len(kept_tokens))
                kept[row, :width], entropy[row, :width] = kept_tokens[:width], entropies[:width]
                advantages[row] = advantage
        decode = decoder(tokenizer)
        return {
            "prompts": [decode(prompt) for prompt in prompts[::group]],
            "completions": [token_texts(decode, completion) for completion in completions],
            "kept_tokens": kept,
            "entropy": entropy,
            "advantages": torch.tensor(advantages),
            "kept_rollouts": torch.tensor([place in self.trained for place in places]),
            "mask": mask,
        }


def joined(parts: Iterable[CollectedRollouts]) -> CollectedRollouts:
    """Joins the rollouts of several processes."""
    whole = CollectedRollouts()
    for part in parts:
        whole.generated |= part.generated
        whole.trained |= part.trained
    return whole
