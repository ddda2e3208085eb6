"""``GRPOTrainer`` with D3S's choice of rollouts and tokens between generation and update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import DistributedType
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import disable_gradient_checkpointing, use_adapter

from ...rollouts import group_advantages
from ...schedule import Budget
from ...tokens import TokenSelection, select_tokens
from ..metrics import groups_without_spread, rollout_metrics, token_metrics, token_sums
from ..sampling_metrics import set_metrics, set_sums
from .config import D3SConfig
from .espo import as_espo
from .gradient import gradient_weights, loss_mask, only_through
from .head import Update, d3s_head
from .head_module import check_head
from .host_number import HostNumber
from .loss_probe import check_loss
from .page import UNMEASURED, PageOfBatch
from .passes import OLD, REFERENCE, Passes
from .recorder import Recorded, recording
from .rollouts import (
    IMAGES,
    Batch,
    check_fields,
    choose_rollouts,
    keep_rollouts,
    last_column,
    ranked_by,
    rows_to_keep,
    take,
    total_rewards,
    trimmed,
)
from .sampling_options import require_one_turn
from .sets import SETS, OverSets, over_sets
from .surface_check import check_class, check_loss_type, check_object
from .watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Scores = tuple[Tensor, Tensor | None, Tensor | None]


class D3STrainer(GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` that trains on the rollouts and the tokens that D3S chooses. Same arguments, same methods.

    Rollouts: once a generation batch has its advantages, rollouts are chosen over all processes (``rollout_rule``), and
    each process gets the same number of rows. Dropped rollouts enter no later forward, and no pass for old or reference
    log-probabilities. The one exception is vLLM's correction, which needs the old ones before the choice.

    Tokens: exactly the top share by ``|advantage| * entropy``, or by another ``token_rule``, is kept, with the entropy
    of each training forward or of one pass before the update (``entropy_from``). The loss is TRL's own, of any type,
    over all valid tokens of the kept rollouts, but gradient flows only through the kept tokens. With
    ``loss_denominator="kept"`` it is multiplied by all / kept, counted over the same tokens as TRL's denominator
    (``docs/trl.md`` has the table). The same holds for KL and the entropy bonus. The value of the loss and the clip
    metrics still cover all tokens. Where the update skips dropped tokens, these count with a ratio of 1 and with the
    entropy of the earlier pass.

    With ``sampling_mask``, all these log-probabilities and entropies are over the set of tokens that a token was drawn
    from, which is recorded while transformers generates.

    Evaluation is TRL's.

    Logged in addition to TRL's metrics are those of :mod:`d3s_kernels.integrations.metrics`: of rollouts, for each
    generation batch of all processes; of tokens, for each micro-batch of all processes. If each sequence has its own
    threshold, the mean is that of the main process's sequences. ``d3s/num_tokens_kept`` is the sum over the run so far.

    Raises:
        TypeError: ``args`` is not a :class:`D3SConfig`.
        ValueError: ``loss_type`` is not known; the LM head has an adapter or is no linear layer.
        UnknownTRL: TRL, or a class that overrides its methods, does what the selection does not cover: when the trainer
            is made, or in the first step.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
        >>> args = D3SConfig("out", num_generations=8, rollouts_start=2, rollouts_end=8, max_steps=1, **elsewhere)
        >>> trainer = D3STrainer(model, reward, args, train_dataset=prompts, processing_class=tokenizer)
        >>> trainer.train().global_step
        1
    """

    epsilon_low: Any  # TRL's numbers; while TRL computes ESPO's loss, tensors with a value for each token
    epsilon_high: Any

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: D3SConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if args is not None and not isinstance(args, D3SConfig):
            raise TypeError(f"args: got a {type(args).__name__}; takes a D3SConfig")
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = D3SConfig(f"{name.split('/')[-1]}-D3S")
        check_class(type(self), D3STrainer)
        check_loss_type(args.loss_type)
        super().__init__(model, reward_funcs, args, *more, **options)
        check_object(self)
        check_head(self.accelerator.unwrap_model(self.model))
        if args.sampling_mask:
            require_one_turn(self)
        if self._espo:
            self.importance_sampling_level = "token"  # what TRL sees: as_espo turns its token ratios into ESPO's
        check_loss(self, super()._compute_loss.__func__)
        self._schedule = args.schedule()
        self._warn_of_little_to_drop()
        self._watch = Watch()
        self._passes: Passes | None = None  # set only while TRL makes a generation batch
        self._loss_inputs: Batch | None = None  # set only while TRL computes a training loss
        self._recorded: Recorded | None = None  # the sets of a generation batch, until they are in the batch
        self._rewards: Tensor | None = None  # of all processes' rollouts, by function; set until rollouts are chosen
        self._draws: tuple[int, torch.Generator] | None = None  # the step, and its generator for the rule "random"
        self._num_tokens_kept: Tensor | None = None  # None until the first micro-batch
        self._page: PageOfBatch | None = None  # set while a generation batch is trained on of which a page is written
        self._last_page: int | None = None  # the step of this run's last page

    def train(self, *arguments: Any, **options: Any) -> Any:
        self._last_page = None  # each run has its own pages
        return super().train(*arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        self._watch.begin()
        loss: Tensor = super().training_step(*arguments, **options)
        self._watch.end(self)
        return loss

    def _warn_of_little_to_drop(self) -> None:
        """Warns once, on the main process, if small groups or small device batches leave little to drop."""
        everything, n, multiple = self.args.generation_batch_size, self.num_generations, self._multiple
        for when, budget in (("start", self._schedule.start), ("end", self._schedule.end)):
            asked, kept = rows_to_keep(everything // n, n, budget.rollouts, multiple)
            given = getattr(self.args, f"rollouts_{when}")
            if when == "start" and asked == everything and given != 1:  # a share of 1 asks for all of them
                message = f"num_generations is {n}, so that no rollout is dropped at the start"
            elif kept > 1.25 * asked:
                message = (
                    f"asking for {asked} of {everything} rollouts, but {kept} are kept: a multiple of processes x "
                    f"steps per generation, {multiple}. A larger per_device_train_batch_size with fewer "
                    "gradient_accumulation_steps lets more be dropped"
                )
            else:
                continue
            if self.accelerator.is_main_process:
                warnings.warn(f"rollouts_{when}: got {given}, {message}", stacklevel=3)
            return

    @property
    def _multiple(self) -> int:
        """The number of kept rows is a multiple of this, so that all micro-batches of all processes have equal size."""
        return int(self.accelerator.num_processes * self.args.steps_per_generation)

    @property
    def _process_group(self) -> ProcessGroup | None:
        """The group of all processes; None for a single process, which does not use torch.distributed."""
        return torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None

    def _budget(self) -> Budget:
        steps = self.state.max_steps
        return self._schedule(min(1.0, self.state.global_step / steps) if steps > 0 else 0.0)

    def _draws_of_step(self, device: torch.device) -> torch.Generator | None:
        """For the rule "random": the same numbers on every process, others in each step, also after a checkpoint."""
        step = self.state.global_step
        if self.args.rollout_rule != "random":
            return None
        if self._draws is None or self._draws[0] != step:
            self._draws = step, torch.Generator(device).manual_seed(self.args.seed + 1_000_003 * step)
        return self._draws[1]

    def _log(self, metrics: dict[str, Tensor]) -> None:
        """Keeps 0-d tensors for the next log, which alone waits for the device. NaN stands for nothing to log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        metrics = self._metrics["train"]
        # The log of an evaluation leaves the metrics of training to the next one.
        ours = [name for name in metrics if name.startswith("d3s/")] if self.model.training else []
        if ours:
            numbers = iter(torch.stack([value.double() for name in ours for value in metrics[name]]).tolist())
        for name in ours:
            metrics[name] = [number for _ in metrics[name] if not math.isnan(number := next(numbers))]
            if not metrics[name]:
                del metrics[name]
        super().log(logs, *more, **options)

    # ---- rollouts: after TRL's generation ----------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self.model.training:
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            return evaluated
        self._passes = passes = Passes(self._pass_names())
        self._page = self._page_if_due()
        try:
            batch: Batch = super()._generate_and_score_completions(inputs)
        finally:
            self._passes = None
        batch = passes.without_postponed(batch)
        check_fields(batch)
        if passes.entropy is not None:
            batch["d3s_entropy"] = passes.entropy
        if self.args.sampling_mask:
            self._add_sets(batch)
        if self._page is not None:
            self._page.add_generated(batch, self.accelerator.process_index, self._tokenizer.pad_token_id)
        batch = self._keep_rollouts(batch)
        self._watch.rollouts_are_chosen()
        for name in passes.postponed:
            batch |= self._postponed(name, batch)
        if self._tokens_before_update:
            self._choose_tokens_of_batch(batch)
        return batch

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
        """Adds the sets that the tokens were drawn from to a generation batch, and logs what they are like."""
        if self._recorded is None:
            raise RuntimeError("sampling_mask: no sets were recorded; takes completions of _generate_single_turn")
        mask = loss_mask(batch).bool()
        recorded, self._recorded = self._recorded.in_columns(mask.shape[1]), None
        batch[SETS] = recorded.sets
        sums = set_sums((recorded.sets >= 0).sum(2), mask, self.args.max_kept, recorded.log_mass)
        self._log(set_metrics(self.accelerator.reduce(sums, reduction="sum"), self._vocabulary))

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **options)
        if self.model.training:
            self._rewards = rewards
            if self._page is not None:
                self._page.add_rewards(total_rewards(rewards, self.reward_weights))
        return rewards

    def _without_spread(self, advantages: Tensor) -> Tensor:
        """Marks the groups whose rewards are all equal. Only where a subclass computes no rewards, advantages tell."""
        rewards, self._rewards = self._rewards, None
        if rewards is None:
            return groups_without_spread(advantages)
        if self.multi_objective_aggregation == "normalize_then_sum":  # each function's rewards teach something
            of_functions = rewards.view(*advantages.shape, -1).transpose(1, 2)
            return groups_without_spread(of_functions).all(dim=1)
        return groups_without_spread(total_rewards(rewards, self.reward_weights).view_as(advantages))

    def _page_if_due(self) -> PageOfBatch | None:
        every, step, last = self.args.selection_page_steps, self.state.global_step, self._last_page
        if every == 0 or (last is not None and last // every == step // every):
            return None
        self._last_page = step
        return PageOfBatch(step, self.num_generations, self.args.steps_per_generation)

    @property
    def _espo(self) -> bool:
        return bool(self.args.importance_sampling_level == "entropy_group")

    @property
    def _corrects_sampling(self) -> bool:
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    def _pass_names(self) -> list[str]:
        """The passes without gradient that TRL makes over a generation batch, by TRL's own conditions."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        names = [] if aligned and not self._corrects_sampling else [OLD]
        return names if self.beta == 0 else [*names, REFERENCE]

    def _is_reference(self, model: Any) -> bool:
        """Whether a model that TRL scores with is the reference: its own model, or the policy with other adapters."""
        if self.ref_model is not None:
            return bool(model is self.ref_model)
        policy = self.accelerator.unwrap_model(self.model)
        if getattr(policy, "peft_config", None) is None:
            return False
        # Layers have a property of this name, models of transformers a method.
        switched_off = any(getattr(module, "disable_adapters", None) is True for module in policy.modules())
        return switched_off or bool(policy.active_adapter == "ref")

    @property
    def _tokens_before_update(self) -> bool:
        source = self.args.entropy_from
        return bool(source == "rollout" or (source == "auto" and OLD in self._pass_names()))

    def _keep_rollouts(self, batch: Batch) -> Batch:
        accelerator, own = self.accelerator, batch["advantages"]
        if own.dim() != 1:
            raise TypeError(f"advantages: got shape {list(own.shape)}; takes one for each rollout, [{len(own)}]")
        here, ranks, budget = accelerator.process_index, accelerator.num_processes, self._budget()
        with_images = own.new_tensor([float("num_images" in batch)])
        of_rows = torch.cat([own.float(), loss_mask(batch).sum(dim=1).float(), with_images])
        everyones = accelerator.gather(of_rows).view(ranks, -1)
        advantages, lengths = (part.reshape(-1, self.num_generations) for part in everyones[:, :-1].chunk(2, dim=1))
        images = bool(everyones[:, -1].any())  # rows with images do not move between ranks
        kept = choose_rollouts(
            ranked_by(advantages, lengths > 0, self.args.rollout_rule),
            budget.rollouts,
            self.args.rollout_scope,
            self._multiple,
            rule=self.args.rollout_rule,
            ranks=ranks if images and ranks > 1 else None,
            generator=self._draws_of_step(own.device),
        )
        share = budget.rollouts / self.num_generations
        self._log(rollout_metrics(kept, lengths.flatten(), self._without_spread(advantages), share))
        if self.args.advantages_from == "kept":
            survivors = advantages.masked_fill(~kept.view_as(advantages), torch.nan)  # NaN is ignored
            # With scale_rewards="batch" TRL has already divided by the standard deviation of the batch.
            scale: Literal["group", "none"] = "group" if self.scale_rewards == "group" else "none"
            batch["advantages"] = group_advantages(survivors, scale=scale).view(ranks, -1)[here]
        own_kept = kept.view(ranks, -1)[here]
        batch = keep_rollouts(batch, own_kept, self._tokenizer.pad_token_id, self._process_group)
        batch = trimmed(batch, self.pad_to_multiple_of)
        batch["num_items_in_batch"] = accelerator.gather(loss_mask(batch).sum()).sum()
        return batch

    def _postponed(self, name: str, batch: Batch) -> Batch:
        """Makes a pass that TRL asked for before the rollouts were chosen; the batch fields it fills."""
        if name == OLD:
            logprob, entropy, _ = self._score(self.model, batch, compute_entropy=self._tokens_before_update)
            return {name: logprob} if entropy is None else {name: logprob, "d3s_entropy": entropy}
        if self.ref_model is not None:
            return {name: self._score(self.ref_model, batch)[0]}
        policy = self.accelerator.unwrap_model(self.model)  # the reference is the policy with another adapter
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return {name: self._score(self.model, batch)[0]}

    def _score(self, model: Any, batch: Batch, **options: Any) -> _Scores:
        """TRL's scoring pass without gradient, over the rows of a batch."""
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        images = {name: batch[name] for name in IMAGES if name in batch}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                over_sets(model, batch.get(SETS)),
                tokens,
                attention,
                batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
                **images,
                **options,
            )

    # ---- tokens: before the update, or as TRL scores them for its loss -----------------------------------------------

    def _choose_tokens_of_batch(self, batch: Batch) -> None:
        """Marks the tokens of a whole generation batch."""
        advantages, mask = batch["advantages"], loss_mask(batch).bool()
        if "d3s_entropy" not in batch:
            batch["d3s_entropy"], batch[UNMEASURED] = self._entropy(batch)
        # Rollouts that the pass skipped have advantage 0, so their scores are 0. Their tokens still count as valid.
        chosen = self._choose_tokens(batch["d3s_entropy"], advantages, mask)
        batch["d3s_kept"], batch["d3s_threshold"] = chosen.mask, chosen.threshold
        batch["d3s_tokens_kept"] = self.accelerator.gather(batch["d3s_kept"].sum()).sum()

    def _entropy(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The entropy of each token that may be kept for it, from an extra pass, and elsewhere the mean; and which rows
        have the mean: those without a token, and where tokens are not ranked by their entropy alone, those without an
        advantage.
        """
        mask = loss_mask(batch).bool()
        useful = mask.any(dim=1)
        if self.args.token_rule not in ("entropy", "entropy_quantile"):
            useful &= batch["advantages"] != 0
        # Every process scores the same number of rows, since all take part in the forward of a sharded model.
        rows = int(self.accelerator.gather(useful.sum()).max())
        unmeasured = torch.ones_like(useful)
        if rows == 0:
            return torch.zeros(mask.shape, device=mask.device), unmeasured
        first = useful.long().argsort(descending=True, stable=True)[:rows]
        scored = self._score(self.model, take(batch, first), compute_entropy=True)[1]
        assert scored is not None  # it was asked for
        mean = torch.where(mask[first], scored, 0.0).sum() / mask[first].sum().clamp(min=1)
        return mean.expand(mask.shape).index_copy(0, first, scored), unmeasured.index_fill(0, first, False)

    def _choose_tokens(self, entropy: Tensor, advantages: Tensor, mask: Tensor) -> TokenSelection:
        """This process's kept tokens: exactly the budget's share, of all processes' tokens or of each row."""
        return select_tokens(
            entropy, advantages, self._budget().token_ratio, rule=self.args.token_rule,
            mask=mask, scope=self.args.token_scope, drop_zeros=self.args.drop_zeros, process_group=self._process_group,
        )  # fmt: skip

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """TRL's mask for ``top_entropy_quantile``, which is off in training: the choice of tokens stands for it."""
        if self._loss_inputs is not None:
            return mask.bool()
        theirs: Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        return theirs

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        if not self.model.training:
            evaluated: Tensor = super()._compute_loss(model, inputs)
            return evaluated
        self._loss_inputs = inputs = dict(inputs)  # a copy, since ESPO changes it and TRL may use the batch again
        ranges = self.epsilon_low, self.epsilon_high
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
            self.epsilon_low, self.epsilon_high = ranges
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *more: Any, **options: Any
    ) -> _Scores:
        def score(model: Any, tokens: Tensor, attention: Tensor, columns: int, **changed: Any) -> _Scores:
            method = super(D3STrainer, self)._get_per_token_logps_and_entropies
            scores: _Scores = method(model, tokens, attention, columns, *more, **{**options, **changed})
            return scores

        module = model.model if isinstance(model, OverSets) else model
        check_head(self.accelerator.unwrap_model(module))  # an adapter may have come since the trainer was made
        arguments = model, input_ids, attention_mask, logits_to_keep
        if self._loss_inputs is not None:
            update = Update(self._alone)
            with d3s_head(update):
                return self._score_for_loss(update, score, self._loss_inputs, *arguments)
        with d3s_head():
            if self._passes is not None and self._passes.names:
                return self._score_before_rewards(score, self._passes, *arguments)
            return score(*arguments)

    def _score_before_rewards(
        self,
        score: Callable[..., _Scores],
        passes: Passes,
        model: Any,
        tokens: Tensor,
        attention: Tensor,
        columns: int,
    ) -> _Scores:
        """Postpones TRL's passes for log-probabilities that only the update needs, until the rollouts are chosen."""
        name = passes.next(self._is_reference(model))
        needed_at_once = name == OLD and self._corrects_sampling
        if needed_at_once:
            logprob, passes.entropy, aux = score(
                model, tokens, attention, columns, compute_entropy=self._tokens_before_update
            )
            return logprob, None, aux
        return passes.postpone(name, tokens.shape[0], columns), None, None

    @property
    def _alone(self) -> bool:
        """Whether nobody else looks at a gradient before the optimizer: no reducer, no shards, no scaler."""
        return self.accelerator.distributed_type == DistributedType.NO and self.accelerator.scaler is None

    def _score_for_loss(
        self, update: Update, score: Callable[..., _Scores], inputs: Batch, model: Any, tokens: Tensor,
        attention: Tensor, columns: int,
    ) -> _Scores:  # fmt: skip
        """The scores for TRL's loss, with hooks that let gradient flow only through the kept tokens."""
        mask, kept = loss_mask(inputs).bool(), inputs.get("d3s_kept")
        if kept is not None and self._tokens_are_independent(inputs):
            logprob, entropy, aux = self._score_kept(score, inputs, kept, model, tokens, attention, columns)
        else:
            logprob, entropy, aux = score(over_sets(model, inputs.get(SETS)), tokens, attention, columns)
        assert entropy is not None  # TRL's loss always asks for it
        if kept is not None:
            threshold = inputs["d3s_threshold"]
        else:
            chosen = self._choose_tokens(entropy.detach(), inputs["advantages"], mask)
            kept, threshold = chosen.mask, chosen.threshold
        update.kept = HostNumber(kept.sum())
        totals = self._log_tokens(kept, mask, entropy.detach(), inputs["advantages"], threshold)
        if (page := self._page) is not None and page.add_trained(inputs, kept, entropy.detach()):
            self._page = None
            folder = Path(self.args.output_dir, "selection")
            page.write(folder, self._tokenizer, self.accelerator.is_main_process)
        if self._espo:
            moved, epsilon = as_espo(inputs, logprob.detach(), entropy.detach(), self.args, self._vocabulary)
            inputs |= moved
            self.epsilon_low = self.epsilon_high = epsilon
        if logprob.requires_grad:
            policy = bonus = torch.ones((), device=kept.device)
            if self.args.loss_denominator == "kept":
                policy, bonus = gradient_weights(self.loss_type, kept, mask, inputs, totals)
            logprob.register_hook(self._watch.seen(only_through(kept, policy)))  # type: ignore[no-untyped-call]
            if entropy.requires_grad:
                entropy.register_hook(only_through(kept, bonus))  # type: ignore[no-untyped-call]
        return logprob, entropy, aux

    def _tokens_are_independent(self, inputs: Batch) -> bool:
        """Whether each token's gradient depends only on its own log-probability: then dropped tokens need no score."""
        return bool(
            self.importance_sampling_level == "token"
            and not self._espo
            and self.loss_type != "vespo"
            and self.beta == 0
            and self.off_policy_mask_threshold is None
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
            and "num_images" not in inputs
        )

    def _score_kept(
        self, score: Callable[..., _Scores], inputs: Batch, kept: Tensor, model: Any, tokens: Tensor,
        attention: Tensor, columns: int,
    ) -> _Scores:  # fmt: skip
        """Scores only rows with a kept token, up to the last kept column; other tokens get the values known before.

        If no token is kept, the first row is still forwarded: all processes take part in a sharded model's forward.
        """
        rows = kept.any(dim=1)
        rows[0] |= ~rows.any()
        place = rows.nonzero()[:, 0]
        prompt, used = tokens.shape[1] - columns, last_column(kept)
        if self.pad_to_multiple_of is not None:
            used = min(columns, -(-(prompt + used) // self.pad_to_multiple_of) * self.pad_to_multiple_of - prompt)
        needed, sets = kept[place, :used], inputs.get(SETS)
        model = over_sets(model, None if sets is None else sets[place, :used])

        def of_kept(labels: Tensor, **model_inputs: Any) -> Any:
            """The model, with labels only at kept tokens, so that the head computes only those."""
            labels = labels.clone()
            labels[:, prompt:].masked_fill_(~needed, -100)
            return model(labels=labels, **model_inputs)

        logprob, entropy, aux = score(of_kept, tokens[place, : prompt + used], attention[place, : prompt + used], used)
        assert entropy is not None
        known = inputs.get("old_per_token_logps")  # makes the ratio of a dropped token 1
        if known is None:
            known = torch.zeros(kept.shape, device=kept.device)

        def everywhere(of_kept: Tensor, known: Tensor) -> Tensor:
            known = torch.where(kept, 0.0, known).to(of_kept.dtype)
            return known.index_add(0, place, pad(of_kept, (0, columns - used)))

        return everywhere(logprob, known), everywhere(entropy, inputs["d3s_entropy"]), aux

    def _log_tokens(self, kept: Tensor, mask: Tensor, entropy: Tensor, advantages: Tensor, threshold: Tensor) -> Tensor:
        """Logs what was kept. Returns the numbers of kept and of all tokens, over all processes."""
        sums = token_sums(kept, mask, entropy, advantages.unsqueeze(1))
        totals: Tensor = self.accelerator.reduce(sums, reduction="sum")
        number = totals[0]
        if self._num_tokens_kept is None:  # a resumed run continues from its last logged value
            logged = [row["d3s/num_tokens_kept"] for row in self.state.log_history if "d3s/num_tokens_kept" in row]
            self._num_tokens_kept = torch.full_like(number, logged[-1] if logged else 0)
        self._num_tokens_kept = self._num_tokens_kept + number
        self._metrics["train"]["d3s/num_tokens_kept"] = [self._num_tokens_kept]  # replaced: TRL logs means
        self._log(token_metrics(totals, threshold, self._budget().token_ratio))
        return totals[:2].float()
