"""``AsyncGRPOTrainer`` with D3S's choice of rollouts between the worker's queue and the batcher, and of tokens in the
loss.

TRL still does everything else: it drops stale samples, forms micro-batches, packs prefix trees, and computes the loss.
Its loss reads log-probabilities and entropies from the model's output. So this module gives TRL an output with one
value for each loss term instead of one for each position, and lets gradient flow only through the kept terms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_async
from trl.trainer.utils import pad as padded

from ...denominators import only_through
from ...heads import read_head
from ...metrics import (
    NOT_FINITE,
    OFF_POLICY_SHARE,
    PARTIAL_GROUPS,
    SHARED_SHARE,
    rollout_metrics,
    token_metrics,
    token_sums,
    token_weights,
)
from ...prefixes import Prefixes
from ...rollouts import groups_without_spread
from ...schedule import progress_of
from ...selection import Selection, in_groups
from ...trust import TrustedTokens, weighs
from .._transformers import RunWithBudget
from .._versions import untested
from .async_config import D3SAsyncGRPOConfig
from .async_window import Rollout, RolloutWindow
from .counts import CountsTokens
from .head import HostNumber, OurHead, check_head, d3s_head, updates_alone
from .scoring import UnknownTRL

if (_wrong := untested("trl", trl.__version__, "1.16", "1.17", "tests/trainers")) is not None:
    raise ImportError(_wrong)

OVERSIZE = "batch/dropped_oversize_total"  # TRL's counter of the samples that are longer than token_budget
WEIGHT, TOKENS, GROUPS_DONE = "d3s_weight", "d3s_tokens", "d3s_groups_done"  # fields of a micro-batch


class WeightedMask(np.ndarray):  # type: ignore[type-arg]
    """A sample's ``completion_mask``, which TRL hands on to its collator, with what the collator needs beside it."""

    weight: np.ndarray[Any, Any]  # float32, for each token: the factor of its loss; 0 if it is not to be chosen
    tokens: int  # the number of tokens in the loss before the sample was cut


class Terms:
    """The loss terms of this process's row, sample after sample."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs = inputs
        self.real = inputs["token_index"] >= 0  # the rest is padding
        self.positions = inputs["token_index"][self.real]  # those that terms are predicted at

    def of(self, name: str) -> Tensor:
        return self.inputs[name][self.real]

    def offsets(self) -> Tensor:
        """Returns the bounds of the samples. A sample without terms has none."""
        _, counts = self.of("segment_id").unique_consecutive(return_counts=True)
        return pad(counts.cumsum(dim=0), (1, 0))


class D3SAsyncGRPOTrainer(CountsTokens, RunWithBudget, AsyncGRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """``AsyncGRPOTrainer`` that trains on the rollouts and the tokens that D3S chooses. It has the same arguments and
    methods.

    Rollouts are chosen from a window of whole groups (``window_groups``) on the process that has the worker's queue, so
    that dropped rollouts reach no process and no micro-batch. Tokens are chosen from the entropies of the training
    forward: exactly the budget's share of the loss terms of all processes. A position that several samples share is
    computed once and is a loss term for each of them. The loss is TRL's own, and its value covers all terms, but
    gradient flows only through the kept ones, so that the LM head's backward computes only their positions.

    With an ``off_policy_rule``, terms whose probability is too far from the generator's have no gradient. If the rule
    has weights, they take the place of TRL's ratio: the gradient of a term is that of ``weight * advantage * logprob``,
    and TRL's metrics of ratios and clipping see a ratio of 1.

    Raises:
        TypeError: ``args`` is not a :class:`D3SAsyncGRPOConfig`.
        ValueError: the LM head has an adapter, or is not a linear layer.
        UnknownTRL: when training starts, if the data do not come through TRL's own queue, batcher and collator; in the
            first step, if no loss was computed from our log-probabilities.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig, D3SAsyncGRPOTrainer
        >>> args = D3SAsyncGRPOConfig("out", num_generations=8, rollouts_start=2, rollouts_end=4, **elsewhere)
        >>> trainer = D3SAsyncGRPOTrainer(folder, args=args, train_dataset=prompts, processing_class=tokenizer, **worker)
        >>> trainer.train().global_step
        1
    """

    args: D3SAsyncGRPOConfig
    _groups_done = 0  # on every process: how many groups were trained on when the micro-batch was made
    _just_counted = HostNumber(torch.zeros(4))  # numbers of terms of the latest micro-batch, for _count_tokens
    _terms_were_chosen = False  # whether a loss of this step came from our log-probabilities

    def __init__(
        self, model: str, reward_funcs: Any = None, args: D3SAsyncGRPOConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if args is None:
            args = D3SAsyncGRPOConfig(f"{model.split('/')[-1]}-D3S")
        if not isinstance(args, D3SAsyncGRPOConfig):
            raise TypeError(f"args: got a {type(args).__name__}; takes a D3SAsyncGRPOConfig")
        super().__init__(model, reward_funcs, args, *more, **options)
        self._check_head()
        self.num_generations = args.num_generations
        self._selection = Selection(args)
        self._draws_of_cuts = torch.Generator().manual_seed(args.seed + 499_979)
        if self.rollout_queue is not None and not args.keep_all:  # on the main process
            self.rollout_queue = self._window(self.rollout_queue)

    def _window(self, samples: Any) -> RolloutWindow:
        args = self.args
        return RolloutWindow(
            samples, args.groups_of_window(), args.num_generations, args.heartbeat_stale_after_s,
            is_stale=lambda sample: self.model_version - sample.model_version > args.max_staleness,
            choose=self._choose_rollouts, prepared=self._prepared, metrics=self._metrics["train"],
        )  # fmt: skip

    def _check_head(self) -> None:
        """Checks that TRL's reading of the head is right, with an attention that needs no tree."""
        model = self.accelerator.unwrap_model(self.model)
        tree, model.config._attn_implementation = model.config._attn_implementation, "eager"
        try:
            check_head(model)
        finally:
            model.config._attn_implementation = tree

    # ---- progress ---------------------------------------------------------------------------------------------------

    @property
    def _progress(self) -> float:
        if self._epoch_stop_groups is None:
            return progress_of(self.state.global_step, self.state.max_steps)
        return min(1.0, self._groups_done / self._epoch_stop_groups)  # ``max_steps`` is only a ceiling then

    def _count_groups(self) -> int:
        """Returns how many groups were trained on, or left out as a whole. The main process alone knows it."""
        self._groups_done = self._groups_before_resume + len(self._trained_groups)
        return self._groups_done

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def _choose_rollouts(self, rollouts: list[Rollout]) -> None:
        """Sets ``kept`` and ``advantage`` of each rollout of a window, and logs the metrics of the choice."""
        self._count_groups()
        n, labels, metrics = self.num_generations, [rollout.group for rollout in rollouts], self._metrics["train"]
        advantages = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float64).float()
        lengths = torch.tensor([sum(int(s.completion_mask.sum()) for s in rollout.samples) for rollout in rollouts])
        too_long = [[sample for sample in rollout.samples if self._is_too_long(sample)] for rollout in rollouts]
        metrics[NOT_FINITE] += [1.0] * int((~advantages.isfinite()).sum())
        metrics[OVERSIZE] += [1.0] * sum(map(len, too_long))
        advantages[torch.tensor([len(samples) > 0 for samples in too_long])] = torch.nan
        if not advantages.isfinite().any():
            raise ValueError(
                f"advantage: got none that is finite for the {len(rollouts)} rollouts of the groups "
                f"{', '.join(map(str, dict.fromkeys(labels)))} ({sum(map(bool, too_long))} of them are longer than "
                f"token_budget, {self.args.token_budget}); takes a finite one for some, or a larger token_budget"
            )
        found = [rollout.samples[0].metrics.get("reward") for rollout in rollouts]
        rewards = None if None in found else torch.tensor(found, dtype=torch.float64)
        kept = self._selection.rollouts(
            advantages, self._progress, groups=labels, group_size=n, has_tokens=lengths > 0, rewards=rewards,
            generator=self._draws_of_step(advantages.device),
        )  # fmt: skip
        table, places = in_groups(advantages if rewards is None else rewards.float(), labels)
        rows = places // table.shape[1]
        whole = torch.bincount(rows) >= n
        equal = groups_without_spread(table) & whole  # the advantages of a part of a group may be of a whole one
        advantages = advantages.masked_fill(equal[rows], 0.0)  # TRL's advantages of equal rewards are rounding errors
        groups_kept = torch.zeros_like(equal).index_put((rows[kept],), torch.ones((), dtype=torch.bool))
        asked = self._budget().rollouts / n
        self._log(rollout_metrics(kept, lengths, equal, groups_kept, asked))
        metrics[PARTIAL_GROUPS] += [1.0] * int((~whole).sum())
        anew = self._selection.advantages(advantages, kept, groups=labels)
        for rollout, is_kept, advantage in zip(rollouts, kept.tolist(), anew.tolist(), strict=True):
            rollout.kept, rollout.advantage = is_kept, advantage
        if self.args.drop_shared_tokens:
            self._mark_shared_tokens(rollouts, advantages)
        left_out = {rollout.group for rollout in rollouts} - {rollout.group for rollout in rollouts if rollout.kept}
        self._trained_groups.update(left_out)  # an epoch, and a checkpoint's place in it, have them behind them

    def _is_too_long(self, sample: Any) -> bool:
        return bool(self.args.token_budget and 0 < self.args.token_budget < len(sample.input_ids))

    def _mark_shared_tokens(self, rollouts: list[Rollout], advantages: Tensor) -> None:
        """Sets ``unshared`` of each rollout: for each sample, a mask of its tokens that may be chosen."""
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        counts = torch.tensor([len(rollout.samples) for rollout in rollouts])
        lengths = [len(sample.input_ids) for sample in samples]
        mask = _joined(samples, "completion_mask").bool()
        unshared = self._selection.candidates(
            _joined(samples, "input_ids"), advantages.repeat_interleave(counts), mask, offsets=_offsets(lengths),
            groups=[rollout.group for rollout in rollouts for _ in rollout.samples],
        )  # fmt: skip
        parts = iter(unshared.split(lengths))
        for rollout in rollouts:
            rollout.unshared = [next(parts) for _ in rollout.samples]
        of_kept = torch.tensor([rollout.kept for rollout in rollouts]).repeat_interleave(counts)
        tokens = of_kept.repeat_interleave(torch.tensor(lengths)) & mask
        self._metrics["train"][SHARED_SHARE].append((float((tokens & ~unshared).sum()), float(tokens.sum())))

    def _prepared(self, rollouts: list[Rollout]) -> list[Any]:
        """Returns the samples of kept rollouts as they are trained on: with the advantage of their rollout and, with a
        rule that cuts, up to their cut.
        """
        samples = [copy.copy(sample) for rollout in rollouts for sample in rollout.samples]
        advantages = [rollout.advantage for rollout in rollouts for _ in rollout.samples]
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        if samples and (self._selection.cuts or self.args.drop_shared_tokens):
            unshared = [
                part
                for rollout in rollouts
                for part in rollout.unshared or [torch.ones(len(sample.input_ids)) for sample in rollout.samples]
            ]
            self._add_weights(samples, torch.cat(unshared))
        return samples

    def _add_weights(self, samples: list[Any], unshared: Tensor) -> None:
        """Gives samples a :class:`WeightedMask`. With a rule that cuts, a sample then ends where it was cut."""
        lengths, mask = [len(sample.input_ids) for sample in samples], _joined(samples, "completion_mask").bool()
        cut = self._selection.prefixes(
            mask,
            self._progress,
            offsets=_offsets(lengths),
            generator=self._draws_of_cuts if self._selection.cuts else None,
        )
        weights, prefixes = (cut.weight * unshared).split(lengths), cut.mask.split(lengths)
        for sample, weight, prefix in zip(samples, weights, prefixes, strict=True):
            end = int(prefix.nonzero().max()) + 1 if self._selection.cuts and prefix.any() else len(prefix)
            weighted = sample.completion_mask[:end].view(WeightedMask)
            weighted.weight, weighted.tokens = weight[:end].numpy(), int(sample.completion_mask.sum())
            sample.input_ids, sample.old_log_probs = sample.input_ids[:end], sample.old_log_probs[:end]
            sample.completion_mask = weighted

    # ---- micro-batches ----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Returns TRL's data loader. On the main process, its collator then adds our fields."""
        loader = super().get_train_dataloader()
        if not self.accelerator.is_main_process:
            return loader
        batcher, collator = loader.dataset, loader.collate_fn
        parts = {
            "batcher": (batcher, (trl_async.FixedCountBatcher, trl_async.TokenBudgetBatcher)),
            "dataset": (getattr(batcher, "dataset", None), (trl_async.RolloutQueueDataset,)),
            "collator": (collator, (trl_async.DataCollatorForRollout,)),
        }
        for name, (found, known) in parts.items():
            if type(found) not in known:
                takes = " or ".join(kind.__name__ for kind in known)
                raise UnknownTRL(f"get_train_dataloader: got the {name} {type(found).__name__}; takes {takes}")
        if batcher.dataset.queue is not self.rollout_queue:
            raise UnknownTRL("get_train_dataloader: its dataset does not read from rollout_queue, the trainer's own")
        collator.torch_call = partial(self._collated, collator.torch_call)
        return loader

    def _collated(self, collate: Callable[[Any], dict[str, Tensor]], examples: Any) -> dict[str, Tensor]:
        """Returns TRL's micro-batch, and beside it what all processes have to know: how many groups are done, the
        number of tokens before samples were cut, and the weights of loss terms. A row is what one process gets.
        """
        (rows,) = examples
        batch = collate(examples)
        batch[GROUPS_DONE] = torch.full((len(rows),), self._count_groups())
        masks = [[sample["completion_mask"] for sample in row.samples] for row in rows]
        if isinstance(masks[0][0], WeightedMask):
            # TRL's loss terms: of each sample in turn, the tokens of the mask, except a first token.
            terms = [np.concatenate([mask.weight[1:][mask[1:] > 0] for mask in of_row]) for of_row in masks]
            batch[WEIGHT] = padded([torch.from_numpy(weights) for weights in terms], padding_value=0)
            batch[TOKENS] = torch.full((len(rows),), sum(mask.tokens for of_row in masks for mask in of_row))
        return batch

    # ---- loss -------------------------------------------------------------------------------------------------------

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        self._terms_were_chosen = False
        loss: Tensor = super().training_step(*arguments, **options)
        if not self._terms_were_chosen:
            raise UnknownTRL(
                "training_step: no token was selected in this step. The loss needs the log-probabilities of the model "
                "that D3SAsyncGRPOTrainer.compute_loss gives to TRL's"
            )
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *more: Any, **options: Any) -> Any:
        if not self.model.training:
            return super().compute_loss(model, inputs, *more, **options)
        self._groups_done = int(inputs[GROUPS_DONE][0])
        terms = Terms(inputs)
        own = {"token_index": torch.where(terms.real, terms.real.cumsum(dim=-1) - 1, -1)}
        if self.args.off_policy_rule != "none":  # a token whose probability is not known is not trusted, and has no NaN
            own["old_log_probs"] = inputs["old_log_probs"].nan_to_num()
        # Our output has a value for each loss term. So the index of a term, in TRL's loss, is its own place.
        loss = super().compute_loss(partial(self._scored, model, terms), inputs | own, *more, **options)
        self._count_tokens(self._just_counted.value())
        return loss

    def _scored(self, model: Any, terms: Terms, **call: Any) -> SimpleNamespace:
        """Stands for the model in TRL's loss. Returns the log-probabilities and entropies of the loss terms."""
        known, alone = read_head(self.accelerator.unwrap_model(model)), updates_alone(self.accelerator)
        head = OurHead(known, adds_to_gradients=alone, logits_dtype=self.args.logits_dtype)
        with d3s_head(head):
            outputs = model(**call)
        logprob, entropy = (part.flatten()[terms.positions] for part in (outputs.log_probs, outputs.entropy))
        trusted = self._trusted(terms, logprob.detach())
        kept, weight = self._choose_terms(terms, entropy.detach(), trusted)
        with_gradient = torch.zeros_like(outputs.log_probs, dtype=torch.int32).flatten()
        head.kept = HostNumber((with_gradient.index_add(0, terms.positions, kept.int()) > 0).sum())
        if logprob.requires_grad:
            logprob.register_hook(only_through(kept, weight))
        # Where TRL's ratio is not to be that to the generator, it is 1 in value, and has the gradient of 1.
        no_ratio = ~trusted.mask | weighs(self.args.off_policy_rule)
        change = torch.where(trusted.mask, logprob - logprob.detach(), 0.0)
        logprob = torch.where(no_ratio, terms.of("old_log_probs").nan_to_num() + change, logprob)
        self._terms_were_chosen = True
        return SimpleNamespace(log_probs=logprob, entropy=entropy, aux_loss=outputs.aux_loss)

    def _trusted(self, terms: Terms, logprob: Tensor) -> TrustedTokens:
        return self._selection.trusted(
            logprob, terms.of("old_log_probs"), terms.of("advantages"), mask=torch.ones_like(logprob, dtype=torch.bool),
            offsets=terms.offsets(), process_group=self._process_group,
        )  # fmt: skip

    def _choose_terms(self, terms: Terms, entropy: Tensor, trusted: TrustedTokens) -> tuple[Tensor, Tensor]:
        """Chooses the loss terms that get a gradient, and logs the metrics of the choice. Returns their mask, and the
        factor of each term's gradient.
        """
        advantages, everything = terms.of("advantages"), torch.ones_like(entropy, dtype=torch.bool)
        left = trusted
        candidates: TrustedTokens | Prefixes = trusted
        if WEIGHT in terms.inputs:
            own = terms.of(WEIGHT)
            candidates = left = trusted.only(own > 0)
            if self._selection.cuts:
                candidates = Prefixes(left.mask, own, left.count)
        chosen = self._selection.tokens(
            entropy, advantages, self._progress, mask=candidates, offsets=terms.offsets(),
            process_group=self._process_group,
        )  # fmt: skip
        kept, weight = chosen.mask, left.weight if chosen.weight is None else left.weight * chosen.weight
        sums = token_sums(kept, everything, entropy, advantages)
        more = torch.stack([part.sum() for part in (left.mask, trusted.mask, kept & trusted.mask)])
        totals = self.accelerator.reduce(torch.cat([sums, more]), reduction="sum")
        number, number_all, *_, number_left, number_trusted, _ = totals
        asked = self._selection.token_share(self._progress)
        metrics, weights = (
            token_metrics(totals[:6], chosen.threshold, asked),
            token_weights(totals[:6], chosen.threshold),
        )
        if self.args.off_policy_rule != "none":
            metrics[OFF_POLICY_SHARE], weights[OFF_POLICY_SHARE] = 1 - number_trusted / number_all, number_all
        self._log(metrics, weights)
        self._just_counted = HostNumber(torch.stack([number, number_all, *totals[-2:]]))
        if self.args.loss_denominator == "kept":
            weight = weight * (number_left / number.clamp(min=1)).float()
        elif TOKENS in terms.inputs:  # TRL divides by the number of terms, which are those before the cuts
            weight = weight * (terms.inputs["global_n_tokens"][0] / terms.inputs[TOKENS][0])
        return kept, weight

    def _log(self, metrics: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> None:
        """Adds values to TRL's metrics. One with a weight is stored as a pair, of which TRL logs the weighted mean."""
        weights = weights or {}
        (*values,) = torch.stack([value.double() for value in [*metrics.values(), *weights.values()]]).tolist()
        of_name = dict(zip(weights, values[len(metrics) :], strict=True))
        for name, value in zip(metrics, values, strict=False):
            weight = of_name.get(name)
            if weight is None:
                self._metrics["train"][name].append(value)
            elif weight > 0:  # otherwise it is a mean of nothing
                self._metrics["train"][name].append((value * weight, weight))


def _joined(samples: list[Any], name: str) -> Tensor:
    """Returns a field of several samples as one tensor."""
    return torch.from_numpy(np.concatenate([np.asarray(getattr(sample, name)) for sample in samples]))


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(dim=0)
