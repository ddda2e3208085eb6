"""Divides the rows of an optimizer step into micro-batches of equal work. The gradient stays that of TRL's division.

TRL shuffles a generation batch, and divides it into micro-batches of equal numbers of rows. All rows are as wide as the
longest row of the generation batch. Here, an optimizer step still trains on the rows that TRL's shuffle gave it. But
these rows are ordered by length, and each micro-batch is cut to the columns that its rows need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...denominators import DENOMINATORS
from ...metrics import padding_metrics
from .batch import Batch, concatenated, take
from .columns import MayCut, all_trimmed, by_work, last_columns, limit_of_columns, row_lengths
from .tokens import ChoosesTokens

SHARE = "d3s_share_of_rows"  # a batch field: the number of the micro-batch's rows / the mean of all micro-batches


class DividesRows(ChoosesTokens):
    """TRL's trainer, but an optimizer step's micro-batches have equal work instead of equal numbers of rows."""

    _waiting: list[Batch]  # the micro-batches that were divided and not trained on yet
    _micro_batches_done = 0  # of the current optimizer step

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._waiting = []
        super().__init__(*arguments, **options)

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        of_trl: Batch = super()._prepare_inputs(generation_batch)
        if not self.model.training or self.args.order_rows == "none":
            return of_trl
        if not self._waiting:
            # Of the generation batch, the micro-batches from this one to the last one of the current optimizer step.
            # They are divided here, not after the generation, because only now it is known where the step ends.
            begin = self._step % self.args.steps_per_generation
            left = self.current_gradient_accumulation_steps - self._micro_batches_done
            self._waiting = self._divided(self._buffered_inputs[begin : begin + left])
        return self._waiting.pop(0)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **options)
        self._micro_batches_done = 0 if self.accelerator.sync_gradients else self._micro_batches_done + 1
        return loss

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
        """Returns whether rows are ordered. With "auto", they are not if tokens are chosen in each micro-batch: other
        rows together in a micro-batch would mean other tokens.
        """
        budget, drop_zeros = self._budget(), self.args.drop_zeros
        same_tokens = self._tokens_before_update or (budget.token_ratio == 1 and not drop_zeros)
        return self._why_rows_stay() is None and (same_tokens or self.args.order_rows == "work")

    def _divided(self, parts: list[Batch]) -> list[Batch]:
        """Divides the rows of TRL's micro-batches anew, into as many, and cuts each to the columns that it needs."""
        whole = concatenated(parts) if len(parts) > 1 else parts[0]
        prompt, completion = (whole[f"{side}_mask"].shape[1] for side in ("prompt", "completion"))
        lengths, cuts, multiple = row_lengths(whole), self._may_cut_here(prompt + completion), self.pad_to_multiple_of
        if not cuts.completions:
            return parts
        needed, rows = self._needed(whole, lengths), lengths.shape[1]
        places = list(torch.arange(rows, device=lengths.device).chunk(len(parts)))
        if len(parts) > 1 and self._orders_rows():
            divided = by_work(needed, len(parts), prompt, cuts, multiple, self._process_group)
            places = [part.rows for part in divided]
        if len(parts) > 1:
            parts = [take(whole, place) | {SHARE: len(place) * len(places) / rows} for place in places]
        parts = all_trimmed(parts, [lengths[:, place] for place in places], multiple, cuts)
        self._log_padding(parts, lengths, [needed[:, place] for place in places], rows * (prompt + completion))
        return parts

    def _may_cut_here(self, columns: int) -> MayCut:
        """Returns which padding may be cut off, the same on all processes, since they divide their rows together."""
        if self.accelerator.num_processes > 1 and limit_of_columns(self.model.config.get_text_config()) is not None:
            here = torch.tensor([columns], device=self.accelerator.device)
            columns = int(self.accelerator.gather(here).amax())
        return self._may_cut(columns)

    def _needed(self, batch: Batch, lengths: Tensor) -> Tensor:
        """Returns the columns that the update needs of each row, as :func:`row_lengths` does: those up to the last kept
        token if the other tokens are not computed.
        """
        if "d3s_kept" not in batch or not self._tokens_are_independent(batch):
            return lengths
        last = last_columns(batch["d3s_kept"])
        return torch.stack([torch.where(last > 0, lengths[0], 0), last])

    def _log_padding(self, parts: list[Batch], lengths: Tensor, needed: list[Tensor], before: int) -> None:
        """Logs how much of what is forwarded is padding. ``before`` is the number of positions without the cuts."""
        forwarded = []
        for part, (prompts, completions) in zip(parts, needed, strict=True):
            width = completions.amax().clamp(min=1, max=part["completion_mask"].shape[1])
            forwarded.append((prompts > 0).sum().clamp(min=1) * (part["prompt_mask"].shape[1] + width))
        tokens, positions = torch.cat(needed, dim=1).sum(), torch.stack(forwarded)
        numbers = [lengths.sum(), torch.full_like(tokens, before), tokens, positions.sum(), positions.amax()]
        everyones = self.accelerator.gather(torch.stack(numbers)).view(-1, len(numbers))
        self._log(padding_metrics(everyones[:, :4].sum(dim=0), everyones[:, 4].amax()))
