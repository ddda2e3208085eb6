"""The page for a generation batch. It shows the rollouts as text, and marks the tokens that were trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ...report.collected import CollectedRollouts, joined
from ...report.selection_page import selection_page
from .batch import Batch, loss_mask

SHOWN = 64  # a page shows the first whole groups of the batch: up to this number of rollouts, but at least one group
ROLLOUT = "d3s_rollout"  # a batch field: the index of each row in the generation batch of all processes


class PageOfBatch:
    """The content of one generation batch's page. Every process collects its part; the main process writes the page."""

    def __init__(self, step: int, group: int, micro_batches: int) -> None:
        self.step, self._group = step, group
        self._awaited = micro_batches  # the number of this process's micro-batches that are not added yet
        self._shown = max(1, SHOWN // group) * group
        self._rollouts = CollectedRollouts()
        self._rewards: Tensor | None = None

    def add_generated(self, batch: Batch, rewards: Tensor | None, process: int, pad_token: int) -> None:
        """Adds this process's rollouts, before any of them is dropped. Stores each row's index in the whole generation
        batch as a field of ``batch``. ``rewards`` has all processes' rewards; NaN means that no function gave the
        rollout a reward.
        """
        self._rewards = None if rewards is None else rewards[: self._shown].float().cpu()
        rows, device = len(batch["completion_ids"]), batch["completion_ids"].device
        batch[ROLLOUT] = torch.arange(process * rows, (process + 1) * rows, device=device)
        prompts, prompt_mask = batch["prompt_ids"].cpu(), batch["prompt_mask"].cpu().bool()
        completions, counts = batch["completion_ids"].cpu(), loss_mask(batch).cpu().bool()
        # If the loss leaves out truncated completions, TRL sets their masks to 0. The page still shows their text.
        has_text = batch["completion_mask"].cpu().bool() | (completions != pad_token)
        places, advantages = torch.arange(1, completions.shape[1] + 1), batch["advantages"].tolist()
        for row, place in self._rows(batch):
            length = int((has_text[row] * places).amax()) if len(places) else 0
            prompt, completion = prompts[row][prompt_mask[row]].tolist(), completions[row, :length].tolist()
            self._rollouts.add_generated(place, prompt, completion, counts[row, :length].clone(), advantages[row])

    def add_trained(self, batch: Batch, kept: Tensor, entropy: Tensor) -> bool:
        """Adds a micro-batch's kept tokens and its entropies, which are NaN where they are not known. Returns whether
        this was the last micro-batch that the page needs from this process. Later micro-batches, which train on the
        same rollouts again, are not added.
        """
        if self._awaited == 0:
            return False
        kept, entropy, advantages = kept.cpu(), entropy.float().cpu(), batch["advantages"].tolist()
        for row, place in self._rows(batch):
            self._rollouts.add_trained(place, kept[row].clone(), entropy[row].clone(), advantages[row])
        self._awaited -= 1
        return self._awaited == 0

    def _rows(self, batch: Batch) -> list[tuple[int, int]]:
        """Returns the rows of ``batch`` that the page shows, each with its index in the whole generation batch."""
        return [(row, place) for row, place in enumerate(batch[ROLLOUT].tolist()) if place < self._shown]

    def write(self, folder: Path, tokenizer: Any, is_main: bool) -> None:
        """Gathers the rollouts of all processes, and writes the page. All processes have to call this method."""
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
