"""A page of what was selected from a generation batch: its rollouts as text, and the tokens that were trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..._page.collected import CollectedRollouts, joined
from ...page import selection_page
from .batch import Batch, loss_mask

SHOWN = 64  # rollouts on a page: whole groups, the first ones of the generation batch
ROLLOUT = "d3s_rollout"  # a batch field: the index of each row in the generation batch of all processes


class PageOfBatch:
    """Collects what the page of one generation batch shows. Every process has one; the main one writes."""

    def __init__(self, step: int, group: int, micro_batches: int) -> None:
        self.step, self._group = step, group
        self._awaited = micro_batches  # the number of this process's micro-batches that are not scored yet
        self._shown = max(1, SHOWN // group) * group
        self._rollouts = CollectedRollouts()
        self._rewards: Tensor | None = None

    def add_generated(self, batch: Batch, rewards: Tensor | None, process: int, pad_token: int) -> None:
        """Adds this process's rollouts before any is dropped, and the rewards of all processes' rollouts (NaN where no
        function gave one). Marks each row with its index in the whole batch.
        """
        self._rewards = None if rewards is None else rewards[: self._shown].float().cpu()
        rows, device = len(batch["completion_ids"]), batch["completion_ids"].device
        batch[ROLLOUT] = torch.arange(process * rows, (process + 1) * rows, device=device)
        prompts, prompt_mask = batch["prompt_ids"].cpu(), batch["prompt_mask"].cpu().bool()
        completions, counts = batch["completion_ids"].cpu(), loss_mask(batch).cpu().bool()
        # TRL sets the mask of a truncated completion to 0 if the loss leaves it out. The completion's text is still
        # shown.
        has_text = batch["completion_mask"].cpu().bool() | (completions != pad_token)
        places, advantages = torch.arange(1, completions.shape[1] + 1), batch["advantages"].tolist()
        for row, place in self._rows(batch):
            length = int((has_text[row] * places).amax()) if len(places) else 0
            prompt, completion = prompts[row][prompt_mask[row]].tolist(), completions[row, :length].tolist()
            self._rollouts.add_generated(place, prompt, completion, counts[row, :length].clone(), advantages[row])

    def add_trained(self, batch: Batch, kept: Tensor, entropy: Tensor) -> bool:
        """Adds a micro-batch with its mask of kept tokens and its entropies (NaN: not measured). Returns whether it
        was the last one of this process.
        """
        kept, entropy, advantages = kept.cpu(), entropy.float().cpu(), batch["advantages"].tolist()
        for row, place in self._rows(batch):
            self._rollouts.add_trained(place, kept[row].clone(), entropy[row].clone(), advantages[row])
        self._awaited -= 1
        return self._awaited == 0

    def _rows(self, batch: Batch) -> list[tuple[int, int]]:
        """The rows of a batch that are shown, each with its index in the whole batch."""
        return [(row, place) for row, place in enumerate(batch[ROLLOUT].tolist()) if place < self._shown]

    def write(self, folder: Path, tokenizer: Any, is_main: bool) -> None:
        """Gathers the rollouts of all processes, and writes the page. All processes have to call this."""
        rollouts = joined(gather_object([self._rollouts]))
        if not is_main:
            return
        path, title = folder / f"step-{self.step:06d}.html", f"Step {self.step}: which tokens are trained on"
        try:
            page = selection_page(**rollouts.arguments(self._group, tokenizer), rewards=self._rewards, title=title)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except Exception as error:  # whatever is wrong with a page, training continues on all processes
            warnings.warn(
                f"selection_page_steps: the page {path} could not be written: {type(error).__name__}: {error}",
                stacklevel=2,
            )
