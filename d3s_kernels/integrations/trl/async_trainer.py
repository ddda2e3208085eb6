"""``AsyncGRPOTrainer`` with D3S's choices: rollouts are chosen between the worker's queue and the batcher, tokens in
the loss.

TRL still drops stale samples, forms micro-batches, packs prefix trees and computes the loss. TRL's loss reads one score
for each loss term from the model's output. This module replaces the output: the new output has one score for each loss
term, and gradient flows only through the scores of the kept terms.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_async

from ..._lm_head.forward import HostNumber
from ..._lm_head.from_model import read_head
from ...off_policy.trusted_tokens import TrustedTokens, weighs
from ...rollouts.select_rollouts import groups_without_spread
from ...selection.loss_weights import only_through
from ...selection.metrics import NOT_FINITE, PARTIAL_GROUPS, REWARD, SHARED_SHARE, rollout_metrics
from ...selection.schedule import progress_of
from ...selection.selection import Selection, in_groups
from ...tokens.random_prefixes import Prefixes
from .._transformers import RunWithBudget
from .async_config import D3SAsyncGRPOConfig
from .async_window import Rollout, RolloutWindow
from .counts import CountsTokens
from .head import OurHead, check_head, d3s_head, updates_alone
from .step import UnknownTRL

OVERSIZE = "batch/dropped_oversize_total"  # TRL's counter of the samples that are longer than token_budget
WEIGHT, TOKENS, GROUPS_DONE = "d3s_weight", "d3s_tokens", "d3s_groups_done"  # fields of a micro-batch


class WeightedMask(np.ndarray):
    """A sample's ``completion_mask`` with two more attributes, which our collator reads. TRL passes the mask on
    unchanged.
    """

    weight: Tensor  # float32, for each token: the factor of its loss; 0: the token must not be chosen
    tokens: int  # the number of tokens in the loss before the sample was cut


class Terms:
    """The loss terms of this process's row of a micro-batch, sample after sample."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs, self._real = inputs, inputs["token_index"] >= 0  # a negative index is padding
        self.positions = inputs["token_index"][self._real]  # the positions that predict the terms
        self.places = torch.where(self._real, self._real.cumsum(dim=-1) - 1, -1)  # each term's own index; -1: padding
        _, counts = torch.unique_consecutive(self["segment_id"], return_counts=True)
        self.offsets = pad(counts.cumsum(dim=0), (1, 0))  # where the terms of each sample begin, and the end

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name][self._real]


class D3SAsyncGRPOTrainer(CountsTokens, RunWithBudget, AsyncGRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """``AsyncGRPOTrainer`` that trains on the rollouts and the tokens that D3S chooses. It has the same arguments and
    methods.

    Rollouts are chosen from windows of whole groups, on the process that has the worker's queue. Tokens are chosen from
    the entropies of the training forward. Exactly the budget's share is kept of the loss terms that a micro-batch has
    on all processes together. A position that several samples share is computed once, and is a term of each of them.
    The loss is TRL's own, and its value covers all terms.

    With an ``off_policy_rule``, a term whose probability is too far from the generator's has no gradient. If the rule
    has weights, they replace TRL's ratio: the gradient is the gradient of ``weight * advantage * logprob``. In TRL's
    metrics, a term has the ratio 1 if it has no gradient, or if the rule has weights.

    Raises:
        TypeError: ``args`` is not a :class:`D3SAsyncGRPOConfig`.
        ValueError: the LM head has an adapter, or is not a linear layer.
        UnknownTRL: the data do not come through TRL's own queue, batcher and collator, or the loss does not read our
            log-probabilities.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig, D3SAsyncGRPOTrainer
        >>> args = D3SAsyncGRPOConfig("out", num_generations=8, rollouts_end=4, max_steps=1, **elsewhere)
        >>> trainer = D3SAsyncGRPOTrainer(folder, reward, args, train_dataset=prompts, **worker)
        >>> trainer.train().global_step
        1
    """

    args: D3SAsyncGRPOConfig
    rollout_queue: Any
    _groups_done = 0  # how many groups had been trained on or dropped as a whole when the micro-batch was made
    _losses = 0  # how many of TRL's losses have read our log-probabilities

    def __init__(
        self, model: str, reward_funcs: Any = None, args: D3SAsyncGRPOConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if args is None:
            args = D3SAsyncGRPOConfig(f"{model.split('/')[-1]}-D3S")
        if not isinstance(args, D3SAsyncGRPOConfig):
            raise TypeError(f"args: got a {type(args).__name__}; takes a D3SAsyncGRPOConfig")
        super().__init__(model, reward_funcs, args, *more, **options)
        check_head(self.accelerator.unwrap_model(self.model))
        self.num_generations, self._selection = args.num_generations, Selection(args)
        self._draws_of_cuts = torch.Generator().manual_seed(args.seed + 499_979)
        if self.rollout_queue is not None and not args.keep_all:  # the main process has the queue
            self.rollout_queue = self._window(self.rollout_queue)

    # ---- rollouts, on the main process ------------------------------------------------------------------------------

    def _window(self, incoming: Any) -> RolloutWindow:
        return RolloutWindow(
            incoming, self.num_generations, self.args.heartbeat_stale_after_s,
            number_of_groups=lambda: self.args.groups_of_window(self._budget().rollouts),
            is_stale=lambda sample: self.model_version - sample.model_version > self.args.max_staleness,
            choose=self._choose_rollouts, prepared=self._prepared, metrics=self._metrics["train"],
        )  # fmt: skip

    @property
    def _progress(self) -> float:
        if self._epoch_stop_groups is None:
            return progress_of(self.state.global_step, self.state.max_steps)
        return min(1.0, self._groups_done / self._epoch_stop_groups)  # here ``max_steps`` is only an upper bound

    def _count_groups(self) -> int:
        self._groups_done = self._groups_before_resume + len(self._trained_groups)
        return self._groups_done

    def _choose_rollouts(self, rollouts: list[Rollout]) -> None:
        self._count_groups()
        n, labels = self.num_generations, [rollout.group for rollout in rollouts]
        advantages = torch.tensor([rollout.advantage for rollout in rollouts])
        lengths = torch.tensor([sum(one.completion_mask.sum() for one in each.samples.values()) for each in rollouts])
        most = max(0, self.args.token_budget or 0) or math.inf
        too_long = torch.tensor([sum(len(one.input_ids) > most for one in each.samples.values()) for each in rollouts])
        self._count(NOT_FINITE, ~advantages.isfinite())
        self._count(OVERSIZE, too_long)
        if not advantages.isfinite().any():
            raise ValueError(
                f"advantage: got {rollouts[0].advantage:g}, ... for the {len(rollouts)} rollouts of a window; takes a "
                "finite one for at least one of them"
            )
        advantages[too_long > 0] = torch.nan
        if not advantages.isfinite().any():  # TRL too would drop each of these samples, and train on the next ones
            warnings.warn(f"token_budget: got {most}; a window without a rollout that fits is dropped", stacklevel=2)
            self._trained_groups.update(labels)
            return
        found = [rollout.first.metrics.get("reward") for rollout in rollouts]
        rewards = None if None in found else torch.tensor(found, dtype=torch.float32)
        kept = self._selection.rollouts(
            advantages, self._progress, groups=labels, group_size=n, has_tokens=lengths > 0, rewards=rewards,
            generator=self._draws_of_step(advantages.device),
        )  # fmt: skip
        table, places = in_groups(advantages if rewards is None else rewards, labels)
        rows = places // table.shape[1]
        whole = rows.bincount() >= n
        equal = groups_without_spread(table) & whole  # TRL's advantages are over whole groups
        advantages = advantages.masked_fill(equal[rows], 0.0)  # TRL's advantages of equal rewards are rounding errors
        groups_kept = rows[kept].bincount(minlength=len(table)) > 0
        metrics = rollout_metrics(kept, lengths, equal, groups_kept, self._budget().rollouts / n)
        self._log(metrics | ({} if rewards is None else {REWARD: rewards.nanmean()}))
        self._count(PARTIAL_GROUPS, ~whole)
        scored = kept if rewards is None else kept & ~rewards.isnan()  # without a reward, TRL's advantage is 0
        anew = self._selection.advantages(advantages, scored, groups=labels)
        for rollout, is_kept, advantage in zip(rollouts, kept.tolist(), anew.tolist(), strict=True):
            rollout.kept, rollout.advantage = is_kept, advantage
        if self.args.drop_shared_tokens:
            self._leave_out_shared_tokens(rollouts, advantages)
        # A group without a kept rollout is finished: epochs and checkpoints count it as trained.
        self._trained_groups.update(set(labels) - {rollout.group for rollout in rollouts if rollout.kept})

    def _leave_out_shared_tokens(self, rollouts: list[Rollout], advantages: Tensor) -> None:
        rows = [(place, sample) for place, rollout in enumerate(rollouts) for sample in rollout.samples.values()]
        ids, mask = (
            pad_sequence([torch.from_numpy(getattr(sample, name)) for _, sample in rows], batch_first=True)
            for name in ("input_ids", "completion_mask")
        )
        of_row, groups = advantages[[place for place, _ in rows]], [sample.group_id for _, sample in rows]
        unshared = self._selection.candidates(ids, of_row, mask, groups=groups)
        for (_, sample), own in zip(rows, unshared.float(), strict=True):
            sample.completion_mask = with_weight(sample.completion_mask, own[: len(sample.input_ids)])
        tokens = mask.bool() & torch.tensor([[rollouts[place].kept] for place, _ in rows])
        self._metrics["train"][SHARED_SHARE].append((float((tokens & ~unshared).sum()), float(tokens.sum())))

    def _prepared(self, rollout: Rollout, sample: Any) -> Any:
        """Returns the sample with its rollout's advantage. If the token rule cuts sequences, the sample ends at a
        random cut.
        """
        sample.advantage = rollout.advantage
        if self._selection.cuts and sample.completion_mask.any():
            mask = torch.from_numpy(np.asarray(sample.completion_mask)).bool().unsqueeze(0)
            tokens = TrustedTokens(mask, mask.float(), mask.sum())  # off-policy tokens are known only after the forward
            cut = self._selection.prefixes(tokens, self._progress, generator=self._draws_of_cuts)
            end = int(cut.mask.nonzero()[-1, 1]) + 1
            weight = cut.weight[0] * getattr(sample.completion_mask, "weight", 1)
            sample.input_ids, sample.old_log_probs = sample.input_ids[:end], sample.old_log_probs[:end]
            sample.completion_mask = with_weight(sample.completion_mask, weight, end)
        return sample

    # ---- micro-batches ----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Returns TRL's data loader, with our fields in its batches."""
        loader = super().get_train_dataloader()
        if self.accelerator.is_main_process:
            batcher, collator = loader.dataset, loader.collate_fn
            source = getattr(batcher, "dataset", None)
            for part, *known in (
                (batcher, trl_async.FixedCountBatcher, trl_async.TokenBudgetBatcher),
                (source, trl_async.RolloutQueueDataset),
                (getattr(source, "queue", None), type(self.rollout_queue)),
                (collator, trl_async.DataCollatorForRollout),
            ):
                if type(part) not in known:
                    takes = " or ".join(kind.__name__ for kind in known)
                    raise UnknownTRL(f"get_train_dataloader: got a {type(part).__name__}; takes TRL's {takes}")
            collator.torch_call = partial(self._collated, collator.torch_call)
        return loader

    def _collated(self, collate: Callable[[Any], dict[str, Tensor]], examples: Any) -> dict[str, Tensor]:
        (rows,) = examples  # of the processes
        batch, masks = collate(examples), [[sample["completion_mask"] for sample in row.samples] for row in rows]
        # TRL's loss terms: sample after sample, the tokens that the mask marks, except the first token of the sample.
        weights = [torch.cat([_weight(mask)[1:][mask[1:] > 0] for mask in of_row]) for of_row in masks]
        tokens = sum(getattr(mask, "tokens", mask[1:].sum()) for of_row in masks for mask in of_row)
        batch[WEIGHT] = pad_sequence(weights, batch_first=True)
        batch[TOKENS], batch[GROUPS_DONE] = (torch.full((len(rows),), n) for n in (int(tokens), self._count_groups()))
        return batch

    # ---- loss -------------------------------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        before = self._losses
        loss: Tensor = super().training_step(*arguments, **options)
        if self._losses == before:
            raise UnknownTRL("training_step: no token was selected. D3SAsyncGRPOTrainer.compute_loss was not called")
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *more: Any, **options: Any) -> Any:
        if not self.model.training:
            return super().compute_loss(model, inputs, *more, **options)
        terms, self._groups_done = Terms(inputs), int(inputs[GROUPS_DONE][0])
        own = {"token_index": terms.places}  # our output has one value for each term
        if self.args.off_policy_rule != "none":  # a token with NaN is not trusted; TRL's loss gets 0 instead of NaN
            own["old_log_probs"] = inputs["old_log_probs"].nan_to_num()
        return super().compute_loss(partial(self._scored, model, terms), inputs | own, *more, **options)

    def _scored(self, model: Any, terms: Terms, **call: Any) -> SimpleNamespace:
        """TRL's loss calls this method instead of the model. Gradient flows only through the kept terms of the
        output.
        """
        known, alone = read_head(self.accelerator.unwrap_model(model)), updates_alone(self.accelerator)
        head = OurHead(known, adds_to_gradients=alone, options=self.args)
        with d3s_head(head):
            outputs = model(**call)
        logprob, entropy = (part.flatten()[terms.positions] for part in (outputs.log_probs, outputs.entropy))
        constant, rule = logprob.detach(), self.args.off_policy_rule
        trusted = self._selection.trusted(
            constant, terms["old_log_probs"], terms["advantages"], mask=torch.ones_like(constant, dtype=torch.bool),
            offsets=terms.offsets, process_group=self._process_group,
        )  # fmt: skip
        left = trusted.only(terms[WEIGHT] > 0)
        chosen = self._selection.tokens(
            entropy.detach(), terms["advantages"], self._progress, offsets=terms.offsets,
            mask=Prefixes(left.mask, terms[WEIGHT], left.count) if self._selection.cuts else left,
            process_group=self._process_group,
        )  # fmt: skip
        kept, weight = chosen.mask, left.weight if chosen.weight is None else left.weight * chosen.weight
        totals = self._sum_tokens(
            kept, torch.ones_like(kept), entropy.detach(), terms["advantages"], left.mask, trusted.mask
        )
        asked = self._selection.token_share(self._progress)
        self._log(*self._metrics_of(totals, chosen.threshold, asked, may_be_off_policy=rule != "none"))
        self._count_tokens(totals[[0, 1, 7, 8]].long().tolist())
        if self.args.loss_denominator == "kept":
            factor = (totals[6] / totals[0].clamp(min=1)).float()
        else:  # TRL divides by the number of terms after the cuts; with this factor, by the number before
            factor = terms.inputs["global_n_tokens"][0] / terms.inputs[TOKENS][0]
        with_gradient = torch.zeros_like(outputs.log_probs, dtype=torch.int32).flatten()
        head.kept.number = HostNumber((with_gradient.index_add(0, terms.positions, kept.int()) > 0).sum())
        if logprob.requires_grad:
            logprob.register_hook(only_through(kept, weight * factor))
        if rule != "none":  # TRL's ratio becomes 1 for terms that are not trusted; for all terms, if weights replace it
            as_one = terms["old_log_probs"].nan_to_num() + torch.where(trusted.mask, logprob - constant, 0.0)
            logprob = torch.where(trusted.mask & (not weighs(rule)), logprob, as_one)
        self._losses += 1
        return SimpleNamespace(log_probs=logprob, entropy=entropy, aux_loss=outputs.aux_loss)

    def _count(self, name: str, numbers: Tensor) -> None:
        if number := float(numbers.sum()):
            self._metrics["train"][name].append(number)

    def _log(self, metrics: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> None:
        """Adds values to TRL's metrics. A value with a weight is added as a pair; TRL logs the weighted mean of the
        pairs.
        """
        weights = weights or {}
        values = torch.stack([value.double() for value in (*metrics.values(), *weights.values())]).tolist()
        of_name = dict(zip(weights, values[len(metrics) :], strict=True))
        for name, value in zip(metrics, values, strict=False):
            if (weight := of_name.get(name)) != 0:  # a mean of nothing is not logged
                self._metrics["train"][name].append(value if weight is None else (value * weight, weight))


def with_weight(mask: Any, weight: Tensor, end: int | None = None) -> WeightedMask:
    """Returns a sample's mask, up to ``end``, with weights of its tokens."""
    weighted: WeightedMask = np.asarray(mask)[:end].view(WeightedMask)
    weighted.weight, weighted.tokens = weight[:end], getattr(mask, "tokens", int(mask[1:].sum()))
    return weighted


def _weight(mask: Any) -> Tensor:
    return mask.weight if isinstance(mask, WeightedMask) else torch.ones(len(mask))
