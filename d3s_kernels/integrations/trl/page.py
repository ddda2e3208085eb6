"""A page of what was selected from a generation batch: its rollouts as text, and the tokens that were trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...page import selection_page
from .rollouts import Batch

SHOWN = 64  # rollouts on a page: whole groups, the first ones of the generation batch
ROLLOUT = "d3s_rollout"  # a batch's field: the place of each row in the generation batch of all processes


class PageOfBatch:
    """Collects what the page of one generation batch shows, on the CPU. Every process has one; the main one writes."""

    def __init__(self, step: int, group: int, micro_batches: int) -> None:
        self.step = step
        self._group = group
        self._awaited = micro_batches  # those of this process that were not scored yet
        self._shown = max(1, SHOWN // group) * group
        self._generated: list[tuple[int, dict[str, Any]]] = []
        self._trained: list[tuple[int, dict[str, Any]]] = []
        self._rewards = torch.zeros(0)

    def has_rewards(self, of_each_function: Tensor, weights: Tensor) -> None:
        """Takes the rewards of all processes' rollouts, ``[rollouts, functions]``; NaN where a function gave none."""
        rewards = (of_each_function * weights.to(of_each_function.device)).nansum(dim=1)
        self._rewards = rewards.masked_fill(of_each_function.isnan().all(dim=1), torch.nan)[: self._shown].float().cpu()

    def generated(self, batch: Batch, process: int) -> None:
        """Takes this process's rollouts before any is dropped, and marks each row with its place in the whole batch."""
        rows, device = len(batch["completion_ids"]), batch["completion_ids"].device
        batch[ROLLOUT] = torch.arange(process * rows, (process + 1) * rows, device=device)
        prompt = batch["prompt_ids"], batch["prompt_mask"]
        completion = batch["completion_ids"], batch["completion_mask"]
        for row, place in self._rows(batch):
            fields = {
                "prompt": prompt[0][row][prompt[1][row].bool()].tolist(),
                "completion": completion[0][row][completion[1][row].bool()].cpu(),
                "advantage": float(batch["advantages"][row]),
            }
            self._generated.append((place, fields))

    def trained_on(self, batch: Batch, kept: Tensor, entropy: Tensor) -> bool:
        """Takes a micro-batch with its tokens' choice. Returns whether it was the last one of this process."""
        for row, place in self._rows(batch):
            fields = {
                "kept": kept[row].cpu(),
                "entropy": entropy[row].float().cpu(),
                "advantage": float(batch["advantages"][row]),
            }
            self._trained.append((place, fields))
        self._awaited -= 1
        return self._awaited == 0

    def _rows(self, batch: Batch) -> list[tuple[int, int]]:
        """The rows of a batch that are shown, each with its place."""
        return [(row, place) for row, place in enumerate(batch[ROLLOUT].tolist()) if place < self._shown]

    def write(self, folder: Path, tokenizer: Any, is_main: bool) -> None:
        """Gathers what the processes have, and writes the page. All processes have to call this."""
        generated, trained = (dict(gather_object(own)) for own in (self._generated, self._trained))
        if not is_main:
            return
        page = self._page(generated, trained, tokenizer)
        path = folder / f"step-{self.step:06d}.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as error:  # a full disk ends no run because of a page
            warnings.warn(f"selection_page_steps: the page {path} could not be written: {error}", stacklevel=2)

    def _page(self, generated: dict[int, dict[str, Any]], trained: dict[int, dict[str, Any]], tokenizer: Any) -> str:
        rollouts = [generated[place] for place in sorted(generated)]
        completions = pad_sequence([rollout["completion"] for rollout in rollouts], batch_first=True)
        lengths = torch.tensor([len(rollout["completion"]) for rollout in rollouts])
        kept = torch.zeros(completions.shape, dtype=torch.bool)
        entropy = torch.zeros(completions.shape)
        advantages = torch.tensor([rollout["advantage"] for rollout in rollouts])
        for place, row in trained.items():
            width = min(completions.shape[1], len(row["kept"]))
            kept[place, :width], entropy[place, :width] = row["kept"][:width], row["entropy"][:width]
            advantages[place] = row["advantage"]
        return selection_page(
            [tokenizer.decode(rollout["prompt"]) for rollout in rollouts[:: self._group]],
            completions,
            kept,
            entropy=entropy,
            advantages=advantages,
            kept_rollouts=torch.tensor([place in trained for place in sorted(generated)]),
            rewards=self._rewards,
            mask=torch.arange(completions.shape[1]) < lengths[:, None],
            tokenizer=tokenizer,
            title=f"Step {self.step}: which tokens are trained on",
        )
