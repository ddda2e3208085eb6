"""A page of what was selected from a generation batch: its rollouts as text, and the tokens that were trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..._page.text import decoder, token_texts
from ...page import selection_page
from .batch import Batch, loss_mask

SHOWN = 64  # rollouts on a page: whole groups, the first ones of the generation batch
ROLLOUT = "d3s_rollout"  # a batch's field: the place of each row in the generation batch of all processes

Fields = dict[str, Any]


class PageOfBatch:
    """Collects what the page of one generation batch shows, on the CPU. Every process has one; the main one writes."""

    def __init__(self, step: int, group: int, micro_batches: int) -> None:
        self.step = step
        self._group = group
        self._awaited = micro_batches  # those of this process that were not scored yet
        self._shown = max(1, SHOWN // group) * group
        self._generated: dict[int, Fields] = {}  # by the place of the rollout
        self._trained: dict[int, Fields] = {}
        self._rewards: Tensor | None = None

    def add_rewards(self, rewards: Tensor) -> None:
        """The rewards of all processes' rollouts; NaN where no function gave one."""
        self._rewards = rewards[: self._shown].float().cpu()

    def add_generated(self, batch: Batch, process: int, pad_token: int) -> None:
        """This process's rollouts before any is dropped. Marks each row with its place in the whole batch."""
        rows, device = len(batch["completion_ids"]), batch["completion_ids"].device
        batch[ROLLOUT] = torch.arange(process * rows, (process + 1) * rows, device=device)
        prompts, prompt_mask = batch["prompt_ids"].cpu(), batch["prompt_mask"].cpu().bool()
        completions, completion_mask = batch["completion_ids"].cpu(), batch["completion_mask"].cpu().bool()
        # TRL sets the mask of a truncated completion to 0 where it is left out of the loss. Its text is still shown.
        lengths = _last_place(completion_mask | (completions != pad_token))
        counts, advantages = loss_mask(batch).cpu().bool(), batch["advantages"].tolist()
        for row, place in self._rows(batch):
            self._generated[place] = {
                "prompt": prompts[row][prompt_mask[row]].tolist(),
                "completion": completions[row, : lengths[row]].tolist(),
                "counts": counts[row, : lengths[row]].clone(),
                "advantage": advantages[row],
            }

    def add_trained(self, batch: Batch, kept: Tensor, entropy: Tensor) -> bool:
        """A micro-batch, with the choice of its tokens, and their entropies, NaN where none was measured. Returns
        whether it was the last one of this process.
        """
        kept, entropy, advantages = kept.cpu(), entropy.float().cpu(), batch["advantages"].tolist()
        for row, place in self._rows(batch):
            self._trained[place] = {
                "kept": kept[row].clone(),
                "entropy": entropy[row].clone(),
                "advantage": advantages[row],
            }
        self._awaited -= 1
        return self._awaited == 0

    def _rows(self, batch: Batch) -> list[tuple[int, int]]:
        """The rows of a batch that are shown, each with its place."""
        return [(row, place) for row, place in enumerate(batch[ROLLOUT].tolist()) if place < self._shown]

    def write(self, folder: Path, tokenizer: Any, is_main: bool) -> None:
        """Gathers what the processes have, and writes the page. All processes have to call this."""
        generated, trained = (dict(gather_object(list(own.items()))) for own in (self._generated, self._trained))
        if not is_main:
            return
        path = folder / f"step-{self.step:06d}.html"
        try:
            page = self._page(generated, trained, tokenizer)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except Exception as error:  # whatever is wrong with a page, training goes on, and so do the other processes
            warnings.warn(
                f"selection_page_steps: the page {path} could not be written: {type(error).__name__}: {error}",
                stacklevel=2,
            )

    def _page(self, generated: dict[int, Fields], trained: dict[int, Fields], tokenizer: Any) -> str:
        rollouts = [generated[place] for place in sorted(generated)]
        counts = pad_sequence([rollout["counts"] for rollout in rollouts], batch_first=True)
        kept, entropy = torch.zeros_like(counts), torch.zeros(counts.shape)
        advantages = torch.tensor([rollout["advantage"] for rollout in rollouts])
        for place, row in trained.items():
            width = min(counts.shape[1], len(row["kept"]))
            kept[place, :width], entropy[place, :width] = row["kept"][:width], row["entropy"][:width]
            advantages[place] = row["advantage"]
        decode = decoder(tokenizer)
        return selection_page(
            [decode(rollout["prompt"]) for rollout in rollouts[:: self._group]],
            [token_texts(decode, rollout["completion"]) for rollout in rollouts],
            kept,
            entropy=entropy,
            advantages=advantages,
            kept_rollouts=torch.tensor([place in trained for place in sorted(generated)]),
            rewards=self._rewards,
            mask=counts,
            title=f"Step {self.step}: which tokens are trained on",
        )


def _last_place(mask: Tensor) -> list[int]:
    """For each row, the number of columns up to the last one that is marked."""
    places = torch.arange(1, mask.shape[1] + 1)
    last: list[int] = (mask * places).amax(dim=1).tolist() if mask.shape[1] else [0] * len(mask)
    return last
