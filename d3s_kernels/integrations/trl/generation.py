"""Chooses the rollouts of TRL's generation batch before training, the same number on each process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...metrics import rollout_metrics, set_metrics, set_sums
from ...recorder import Recorded, recording
from ...rollouts import groups_without_spread
from .._rewards import total_rewards, without_spread
from .batch import SETS, Batch, joined, keep_rollouts, loss_mask, take, trimmed
from .page import PageOfBatch
from .refill import log_again, other_prompts, replacements, rows_of, take_logged
from .surface import OLD, Passes
from .tokens import ChoosesTokens


class ChoosesRollouts(ChoosesTokens):
    """Chooses rollouts, over all processes, from each batch that TRL has generated and scored for training."""

    _recorded: Recorded | None = None  # the sets of a generation batch, until they are in the batch
    _rewards: Tensor | None = None  # of all processes' rollouts, by function; set until rollouts are chosen
    _last_page: int | None = None  # the step of this run's last page

    def train(self, *arguments: Any, **options: Any) -> Any:
        self._last_page, self._kept_in_update = None, 0  # a new run starts new pages and a new update
        return super().train(*arguments, **options)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self.model.training:
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            return evaluated
        self._page = self._page_if_due()
        batch, postponed = self._scored(inputs)
        if self.args.refill:
            batch = self._refilled(batch, inputs)
        if self._page is not None:
            if self._rewards is not None:
                self._page.add_rewards(total_rewards(self._rewards, self.reward_weights))
            self._page.add_generated(batch, self.accelerator.process_index, self._tokenizer.pad_token_id)
        batch = self._keep_rollouts(batch)
        self._watch.rollouts_were_chosen = True
        for name in postponed:
            batch |= self._postponed(name, batch)
        if self.args.off_policy_rule != "none" and OLD not in batch:
            batch |= self._postponed(OLD, batch)
        if self._tokens_before_update:
            self._choose_tokens_of_batch(batch)
        return batch

    def _scored(self, inputs: list[dict[str, Any]]) -> tuple[Batch, Iterable[str]]:
        """TRL's generation batch of these prompts, and the passes that wait until the rollouts are chosen."""
        self._passes = passes = Passes(self._pass_names())
        try:
            batch: Batch = super()._generate_and_score_completions(inputs)
        finally:
            self._passes = None
        batch = passes.without_postponed(batch)
        if passes.entropy is not None:
            batch["d3s_entropy"] = passes.entropy
        if self.args.sampling_mask:
            self._add_sets(batch)
        return batch, passes.postponed

    def _refilled(self, batch: Batch, inputs: list[dict[str, Any]]) -> Batch:
        """Replaces groups without a spread, at most ``refill`` times. Groups are whole on their rank and do not move,
        and all ranks know all rewards, so that the ranks agree without another message.
        """
        accelerator, n, dataset = self.accelerator, self.num_generations, self.train_dataset
        if "num_images" in batch or not hasattr(dataset, "__len__") or self._rewards is None:
            raise ValueError(
                "refill: takes prompts without images, a data set with a length, and rewards of TRL's reward functions"
            )
        ranks, here, times, before = accelerator.num_processes, accelerator.process_index, 0, self._same(self._rewards)
        same = before
        while times < self.args.refill and bool(same.any()):
            rewards, missing = self._rewards, int(same.view(ranks, -1).sum(dim=1).amax())
            seeds, logged = (self.args.seed, self.state.global_step, times), take_logged(self._logs)
            more, _ = self._scored(other_prompts(dataset, inputs[0], missing, n, ranks, here, *seeds))
            groups = replacements(same.view(ranks, -1), self._same(self._rewards).view(ranks, -1))
            rows = rows_of(groups, n)
            batch = take(joined(batch, more, self._tokenizer.pad_token_id), rows[here])
            log_again(self._logs, logged, rows, missing * n)
            everyones = torch.cat([part.view(ranks, -1, part.shape[1]) for part in (rewards, self._rewards)], dim=1)
            self._rewards = everyones[torch.arange(ranks, device=rows.device).unsqueeze(1), rows].flatten(0, 1)
            same, times = self._same(self._rewards), times + 1
        refilled = (before & ~same).sum().double()
        self._log({"d3s/refills": torch.full_like(refilled, times), "d3s/groups_refilled": refilled})
        return batch

    def _page_if_due(self) -> PageOfBatch | None:
        every, step, last = self.args.selection_page_steps, self.state.global_step, self._last_page
        if every == 0 or (last is not None and last // every == step // every):
            return None
        self._last_page = step
        return PageOfBatch(step, self.num_generations, self.args.steps_per_generation)

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> tuple[list[list[int]], Any]:
        generate = super()._generate_single_turn
        if not (self.args.sampling_mask and self.model.training):
            completions, logprobs = generate(*arguments, **options)
            return completions, logprobs
        with recording(self.accelerator.unwrap_model(self.model), self.args.max_kept) as recorder:
            completions, _ = generate(*arguments, **options)
        self._recorded = recorded = recorder.recorded(completions)
        rows = zip(recorded.logprob.tolist(), completions, strict=True)
        return completions, [row[: len(tokens)] for row, tokens in rows]

    def _add_sets(self, batch: Batch) -> None:
        """Adds the sets that the tokens were drawn from to a generation batch, and logs metrics about them."""
        if self._recorded is None:
            raise RuntimeError("sampling_mask: no sets were recorded; takes completions of _generate_single_turn")
        mask = loss_mask(batch).bool()
        recorded, self._recorded = self._recorded.in_columns(mask.shape[1]), None
        batch[SETS] = recorded.sets
        sums = set_sums((recorded.sets >= 0).sum(2), mask, self.args.max_kept, recorded.log_mass)
        self._log(set_metrics(self.accelerator.reduce(sums, reduction="sum"), self._vocabulary))

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **options)
        if self.model.training:
            self._rewards = rewards
        return rewards

    def _without_spread(self, advantages: Tensor) -> Tensor:
        """Marks the groups whose rewards are all equal; or whose advantages are, if a subclass computes no rewards."""
        rewards, self._rewards = self._rewards, None
        return groups_without_spread(advantages) if rewards is None else self._same(rewards)

    def _same(self, rewards: Tensor) -> Tensor:
        """Marks the groups whose rewards are all equal, from the rewards of all functions: bool ``[groups]``."""
        separately = self.multi_objective_aggregation == "normalize_then_sum"
        return without_spread(rewards, self.reward_weights, self.num_generations, separately)

    def _keep_rollouts(self, batch: Batch) -> Batch:
        accelerator, own = self.accelerator, batch["advantages"]
        if own.dim() != 1:
            raise TypeError(f"advantages: got shape {list(own.shape)}; takes one for each rollout, [{len(own)}]")
        ranks, n = accelerator.num_processes, self.num_generations
        with_images = own.new_tensor([float("num_images" in batch)])
        of_rows = torch.cat([own.float(), loss_mask(batch).sum(dim=1).float(), with_images])
        everyones = accelerator.gather(of_rows).view(ranks, -1)
        advantages, lengths = (part.reshape(-1, n) for part in everyones[:, :-1].chunk(2, dim=1))
        budget, number = self._budget(), advantages.numel()
        everything = self._selection.number_of_rollouts(self._progress, number // n, n, self._multiple)[1] == number
        everyone = torch.ones_like(lengths, dtype=torch.bool)
        kept = everyone if everything else self._chosen(advantages, lengths, everyones[:, -1])
        same = self._without_spread(advantages)
        self._log(rollout_metrics(kept.flatten(), lengths.flatten(), same, budget.rollouts / n))
        if not everything:  # else no row moves, and there is no host sync
            batch = self._rows_of(batch, kept, advantages, same)
        if not everything or self.args.refill:
            batch = trimmed(batch, self.pad_to_multiple_of)
        batch["num_items_in_batch"] = accelerator.gather(loss_mask(batch).sum()).sum()
        return batch

    def _chosen(self, advantages: Tensor, lengths: Tensor, with_images: Tensor) -> Tensor:
        """Marks the rollouts that all processes keep: bool ``[groups, n]``, the same on each of them."""
        ranks = self.accelerator.num_processes
        images = bool(with_images.any())  # rows with images do not move between ranks
        return self._selection.rollouts(
            advantages,
            self._progress,
            has_tokens=lengths > 0,
            multiple_of=self._multiple,
            ranks=ranks if images and ranks > 1 else None,
            generator=self._draws_of_step(advantages.device),
        )

    def _rows_of(self, batch: Batch, kept: Tensor, advantages: Tensor, same: Tensor) -> Batch:
        """The kept rows, the same number on each process, from this process's rows and all processes' advantages.
        ``same`` marks the groups without a spread.
        """
        ranks, here = self.accelerator.num_processes, self.accelerator.process_index
        if self.args.advantages_from == "kept":
            anew = self._selection.advantages(advantages, kept, scale=self.scale_rewards, without_spread=same)
            batch["advantages"] = anew.view(ranks, -1)[here]
        return keep_rollouts(batch, kept.view(ranks, -1)[here], self._tokenizer.pad_token_id, self._process_group)
