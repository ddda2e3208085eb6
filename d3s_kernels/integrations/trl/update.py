"""Divides the rows of an optimizer step into micro-batches of equal work. The gradient stays that of TRL's division.

TRL shuffles a generation batch, and divides it into micro-batches of equal numbers of rows. All rows are as wide as the
longest row of the generation batch. Here, an optimizer step still trains on the rows that TRL's shuffle gave it. But
these rows are ordered by length, and each micro-batch is cut to the columns that its rows need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ...selection.loss_weights import DENOMINATORS
from ...selection.metrics import padding_metrics
from .batch import PREFIX, Batch, concatenated, take
from .columns import MayCut, all_trimmed, divided_by_work, last_columns, limit_of_columns, row_lengths
from .tokens import ChoosesTokens

SHARE = "d3s_share_of_rows"  # a batch field: the number of the micro-batch's rows / the mean of all micro-batches


class BeginStep(TrainerCallback):
    """Calls a function when an optimizer step begins, also if the step before was broken off."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._function()


class DividesRows(ChoosesTokens):
    """TRL's trainer, but an optimizer step's micro-batches have equal work instead of equal numbers of rows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._begin_step()
        super().__init__(*arguments, **options)
        self.add_callback(BeginStep(self._begin_step))

    def _begin_step(self) -> None:
        self._micro_batches_done = 0  # of the current optimizer step
        self._waiting: list[Batch] = []  # the micro-batches that were divided and not trained on yet

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        of_trl: Batch = super()._prepare_inputs(generation_batch)
        if not self.model.training or self.args.order_rows == "none":
            return of_trl
        if not self._waiting:
            # Of the generation batch, the micro-batches from this one to the last one of the current optimizer step.
            # They are divided here, not after the generation, because only now it is known where the step ends.
            begin = self._step % self.args.steps_per_generation
            left = max(1, self.current_gradient_accumulation_steps - self._micro_batches_done)
            self._waiting = self._divided(self._buffered_inputs[begin : begin + left])
        self._micro_batches_done += 1
        return self._waiting.pop(0)

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)
        # A mean over the micro-batch's rows; the other losses divide by a number that no micro-batch changes.
        is_mean_of_rows = DENOMINATORS[self.loss_type] in ("sequence", "sequences", "constant")
        return loss * inputs[SHARE] if SHARE in inputs and is_mean_of_rows else loss

    def _why_rows_stay(self) -> str | None:
        """Returns why the gradient depends on which rows are in a micro-batch together, or None if it does not."""
        if DENOMINATORS[self.loss_type] == "process":
            return f"loss_type {self.loss_type!r} is a mean over the tokens of each micro-batch"
        if self._entropy_bonus_enabled:
            return "the entropy bonus is a mean over the tokens of each micro-batch"
        if self.aux_loss_enabled:
            return "the router loss is computed for each micro-batch"
        return None

    def _orders_rows(self) -> bool:
        """Returns whether rows are ordered. With "auto", they are not if tokens are chosen, and their number is rounded
        up, in each micro-batch: with other rows in a micro-batch, other tokens would be kept.
        """
        keeps_all = self._budget().token_ratio == 1 and not self.args.drop_zeros
        same_tokens = keeps_all or self._tokens_before_update
        return self._why_rows_stay() is None and (same_tokens or self.args.order_rows == "work")

    def _divided(self, parts: list[Batch]) -> list[Batch]:
        """Divides the rows of TRL's micro-batches anew, into as many, and cuts each to the columns that it needs."""
        whole = concatenated(parts) if len(parts) > 1 else parts[0]
        prompt, completion = (whole[f"{side}_mask"].shape[1] for side in ("prompt", "completion"))
        may_cut = self._may_cut_everywhere(prompt + completion)
        if not may_cut.completions:
            return parts
        lengths, last = row_lengths(whole), self._last_needed(whole)
        rows = lengths.shape[1]
        places = list(torch.arange(rows, device=lengths.device).chunk(len(parts)))
        if len(parts) > 1 and self._orders_rows():
            work = lengths if last is None else torch.stack([torch.where(last > 0, lengths[0], 0), last])
            divided = divided_by_work(work, len(parts), prompt, may_cut, self.pad_to_multiple_of, self._process_group)
            places = [part.rows for part in divided]
        if len(parts) > 1:
            parts = [take(whole, place) | {SHARE: len(place) * len(places) / rows} for place in places]
        parts = all_trimmed(parts, [lengths[:, place] for place in places], self.pad_to_multiple_of, may_cut)
        before = torch.stack([lengths.sum(), lengths.new_tensor(rows * (prompt + completion))])
        forwarded = [
            self._forwarded(part, lengths[:, place], None if last is None else last[place])
            for part, place in zip(parts, places, strict=True)
        ]
        self._log_padding(before, torch.stack(forwarded))
        return parts

    def _may_cut_everywhere(self, columns: int) -> MayCut:
        """Returns which padding may be cut off on all processes, since they divide their rows together."""
        if self.accelerator.num_processes > 1 and limit_of_columns(self.model.config.get_text_config()) is not None:
            here = torch.tensor([columns], device=self.accelerator.device)
            columns = int(self.accelerator.gather(here).amax())
        return self._may_cut(columns)

    def _last_needed(self, batch: Batch) -> Tensor | None:
        """Returns, for each row, the number of columns up to its last kept token, or up to its cut, if the other tokens
        are not computed; otherwise None.
        """
        needed = batch.get("d3s_kept", batch.get(PREFIX))
        return last_columns(needed) if needed is not None and self._tokens_are_independent(batch) else None

    def _forwarded(self, part: Batch, lengths: Tensor, last: Tensor | None) -> Tensor:
        """Returns int64 ``[2]``: how many tokens, and how many positions, the forward of a micro-batch has."""
        rows, prompt = part["prompt_mask"].shape
        columns = part["completion_mask"].shape[1]
        if last is None:
            return torch.stack([lengths.sum(), lengths.new_tensor(rows * (prompt + columns))])
        forwarded = last > 0  # the other rows are left out; if all are, one is forwarded
        width = prompt + self._columns_for(last, prompt, columns)
        tokens = torch.where(forwarded, lengths[0] + last, 0).sum()
        return torch.stack([tokens, forwarded.sum().clamp(min=1) * width])

    def _log_padding(self, before: Tensor, forwarded: Tensor) -> None:
        """Logs how much of what is forwarded is padding, over all processes. ``forwarded``, ``[micro-batches, 2]``, has
        the numbers of tokens and of positions; ``before``, ``[2]``, those of the whole without cuts.
        """
        numbers = torch.cat([before, forwarded.sum(dim=0), forwarded[:, 1].amax().view(1)])
        everyones = self.accelerator.gather(numbers).view(-1, len(numbers))
        self._log(padding_metrics(everyones[:, :4].sum(dim=0), everyones[:, 4].amax()))
