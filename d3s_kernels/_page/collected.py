"""Collects the rollouts of a step from its micro-batches, to make a page of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .text import decoder, token_texts


class CollectedRollouts:
    """The data of rollouts that a page shows: CPU tensors, keyed by the rollout's index in the step's batch."""

    def __init__(self) -> None:
        self.generated: dict[int, tuple[Sequence[int], Sequence[int], Tensor, float]] = {}
        self.trained: dict[int, tuple[Tensor, Tensor, float]] = {}

    def add_generated(
        self, place: int, prompt: Sequence[int], completion: Sequence[int], counts: Tensor, advantage: float
    ) -> None:
        """Adds a rollout before any rollout is dropped: its token ids, which tokens are in the loss, its advantage."""
        self.generated[place] = prompt, completion, counts, advantage

    def add_trained(self, place: int, kept: Tensor, entropy: Tensor, advantage: float) -> None:
        """Adds a rollout that is trained on: its kept tokens, the entropies of all its tokens (NaN if not measured),
        and the advantage that it is trained with.
        """
        self.trained[place] = kept, entropy, advantage

    def arguments(self, group: int, tokenizer: Any) -> dict[str, Any]:
        """The arguments of :func:`d3s_kernels.selection_page`, without the title, for groups of this size."""
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
    """The rollouts of several processes."""
    whole = CollectedRollouts()
    for part in parts:
        whole.generated |= part.generated
        whole.trained |= part.trained
    return whole
