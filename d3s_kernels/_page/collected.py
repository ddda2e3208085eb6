"""Collects the rollouts of a step from its micro-batches, to make a page of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .text import decoder, token_texts

Fields = dict[str, Any]


class CollectedRollouts:
    """What a page shows of rollouts, as CPU tensors, keyed by the rollout's index in the step's batch."""

    def __init__(self) -> None:
        self.generated: dict[int, Fields] = {}
        self.trained: dict[int, Fields] = {}

    def add_generated(
        self, place: int, prompt: Sequence[int], completion: Sequence[int], counts: Tensor, advantage: float
    ) -> None:
        """Adds a rollout, before any is dropped: its token ids, which of its tokens are in the loss, its advantage."""
        self.generated[place] = {
            "prompt": prompt, "completion": completion, "counts": counts, "advantage": advantage
        }  # fmt: skip

    def add_trained(self, place: int, kept: Tensor, entropy: Tensor, advantage: float) -> None:
        """Adds a rollout that is trained on: its kept tokens, the entropies of all its tokens (NaN if not measured),
        and the advantage that it is trained with.
        """
        self.trained[place] = {"kept": kept, "entropy": entropy, "advantage": advantage}

    def arguments(self, group: int, tokenizer: Any) -> dict[str, Any]:
        """The arguments of :func:`d3s_kernels.selection_page` but its title, for groups of this size."""
        places = sorted(self.generated)
        rollouts = [self.generated[place] for place in places]
        counts = pad_sequence([rollout["counts"] for rollout in rollouts], batch_first=True)
        kept, entropy = torch.zeros_like(counts), torch.zeros(counts.shape)
        advantages = [rollout["advantage"] for rollout in rollouts]
        for row, place in enumerate(places):
            if (trained := self.trained.get(place)) is not None:
                width = min(counts.shape[1], len(trained["kept"]))
                kept[row, :width], entropy[row, :width] = trained["kept"][:width], trained["entropy"][:width]
                advantages[row] = trained["advantage"]
        decode = decoder(tokenizer)
        return {
            "prompts": [decode(rollout["prompt"]) for rollout in rollouts[::group]],
            "completions": [token_texts(decode, rollout["completion"]) for rollout in rollouts],
            "kept_tokens": kept,
            "entropy": entropy,
            "advantages": torch.tensor(advantages),
            "kept_rollouts": torch.tensor([place in self.trained for place in places]),
            "mask": counts,
        }


def joined(parts: Iterable[CollectedRollouts]) -> CollectedRollouts:
    """The rollouts of several processes."""
    whole = CollectedRollouts()
    for part in parts:
        whole.generated |= part.generated
        whole.trained |= part.trained
    return whole
