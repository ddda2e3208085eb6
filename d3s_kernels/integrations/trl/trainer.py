"""``GRPOTrainer`` with D3S's choice of rollouts and tokens between generation and update.

This file sets up the trainer, and chooses the rollouts after TRL has made a generation batch. If TRL asks for scores of
tokens, this file calls the method that fits the purpose of the scores. :mod:`.tokens` overrides what TRL does while it
computes a loss. :mod:`.scoring` overrides TRL's passes without gradient, and TRL's log.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..._lm_head.from_model import read_head
from ...rollouts.select_rollouts import Scale, groups_without_spread
from ...selection.metrics import SHARED_SHARE, rollout_metrics, set_metrics, set_sums
from ...selection.selection import Selection
from ...support.recorder import Recorded, recording
from ...tokens.shared_tokens import shared_tokens
from .._transformers import total_rewards, without_spread
from .batch import DRAWS, SETS, SHARED, Batch, joined, keep_rollouts, loss_mask, take
from .columns import trimmed
from .config import D3SConfig
from .head import OurHead, OverSets, check_head, d3s_head, updates_alone
from .page import PageOfBatch
from .refill import log_again, other_prompts, replacements, rows_of, take_logged
from .scoring import OLD, Call, Passes, Scores, UnknownTRL
from .update import DividesRows


class D3STrainer(DividesRows):
    """``GRPOTrainer`` that trains on the rollouts and the tokens that D3S chooses. It has the same arguments and
    methods. Evaluation does not change.

    Rollouts are chosen over all processes (``rollout_rule``) as soon as a generation batch has its advantages, and each
    process gets the same number of rows. No later forward pass includes dropped rollouts, not even the passes for old
    and reference log-probabilities. There is one exception: if TRL corrects vLLM's probabilities, it computes the old
    log-probabilities of all rollouts before the choice.

    Tokens are ranked by ``|advantage| * entropy``, or by another ``token_rule``, and exactly the top share is kept. The
    entropies come either from each training forward, or from one pass before the update (``entropy_from``). The loss,
    of any type, is TRL's own and covers all valid tokens of the kept rollouts, but gradient flows only through the kept
    tokens. With ``loss_denominator="kept"``, the whole gradient is multiplied by a factor: the number of all tokens,
    divided by the number of kept tokens. Both numbers are counted over the tokens of TRL's denominator (``docs/trl.md``
    has the table). The factor also applies to the gradients of KL and of the entropy bonus. The value of the loss and
    the clip metrics still cover all tokens. If the update does not compute dropped tokens, they count with a ratio of 1
    and with the entropy of the earlier pass.

    With ``sampling_mask``, a token's log-probabilities and entropies are over the set that the token was drawn from.
    The sets are recorded while transformers generates.

    The metrics of :mod:`d3s_kernels.metrics` are logged over all processes: metrics of rollouts once per generation
    batch, metrics of tokens once per micro-batch. If each sequence has its own threshold, the logged threshold is the
    mean over the main process's sequences. ``d3s/num_tokens_kept`` is the sum over the run so far.

    Raises:
        TypeError: ``args`` is not a :class:`D3SConfig`.
        ValueError: the LM head has an adapter, or is not a linear layer.
        UnknownTRL: in the first step, if a subclass overrides methods in a way that the selection does not support.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
        >>> args = D3SConfig("out", num_generations=8, rollouts_start=2, rollouts_end=8, max_steps=1, **elsewhere)
        >>> trainer = D3STrainer(model, reward, args, train_dataset=prompts, processing_class=tokenizer)
        >>> trainer.train().global_step
        1
    """

    _recorded: Recorded | None = None  # the sets of a generation batch, until they are added to the batch
    _rewards: Tensor | None = None  # all processes' rewards, by function; set until rollouts are chosen
    _rollouts_were_chosen = False  # for the current generation batch, on which several steps may train
    _last_page: int | None = None  # the step of the latest page in this run

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: D3SConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if args is not None and not isinstance(args, D3SConfig):
            raise TypeError(f"args: got a {type(args).__name__}; takes a D3SConfig")
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = D3SConfig(f"{name.split('/')[-1]}-D3S")
        super().__init__(model, reward_funcs, args, *more, **options)
        check_head(self.accelerator.unwrap_model(self.model))
        for name in ("tools", "environment_factories", "rollout_func"):
            if args.sampling_mask and getattr(self, name, None):
                raise ValueError(
                    f"{name.replace('factories', 'factory')}: got one with sampling_mask; takes none: tokens of other "
                    "turns and of tools have no set"
                )
        if self._espo:
            self.importance_sampling_level = "token"  # TRL computes token ratios; as_espo turns them into ESPO's
        self._selection = Selection(args)
        if args.order_rows == "work" and (reason := self._why_rows_stay()) is not None:
            raise ValueError(f"order_rows: got 'work'; takes 'auto' or 'none', because {reason}")
        self._warn_of_little_to_drop()

    def _warn_of_little_to_drop(self) -> None:
        """Warns once, on the main process, if small groups or small device batches leave little to drop."""
        total, n, multiple = self.args.generation_batch_size, self.num_generations, self._multiple
        for when, progress in (("start", 0.0), ("end", 1.0)):
            asked, kept = self._selection.number_of_rollouts(progress, total // n, n, multiple)
            value = getattr(self.args, f"rollouts_{when}")
            drops_nothing = when == "start" and asked == total and value != 1  # a share of 1 is meant to keep all
            if self.accelerator.is_main_process and (drops_nothing or kept > 1.25 * asked):
                warnings.warn(
                    f"rollouts_{when}: got {value}, but {kept} of {total} rollouts are kept: a group has {n}, and "
                    f"their number is a multiple of processes x steps per generation, {multiple}. More num_generations,"
                    " or a larger per_device_train_batch_size with fewer gradient_accumulation_steps, drop more",
                    stacklevel=3,
                )
                return

    def train(self, *arguments: Any, **options: Any) -> Any:
        self._last_page = None  # a new run starts new pages
        return super().train(*arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        self._gradient_was_selected = False
        loss: Tensor = super().training_step(*arguments, **options)
        if not self._rollouts_were_chosen:
            self._raise_not_covered(
                ("_prepare_inputs", "_generate_and_score_completions"),
                "no rollouts were chosen for this step. Its batch has to come from "
                "D3STrainer._generate_and_score_completions",
            )
        if not self._gradient_was_selected:
            self._raise_not_covered(
                ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"),
                "no token was selected in this step. The loss needs a gradient through the log-probabilities of "
                "D3STrainer._compute_loss",
            )
        return loss

    def _raise_not_covered(self, names: tuple[str, ...], message: str) -> NoReturn:
        """Raises an UnknownTRL with ``message``. If some of the named methods are neither ours nor TRL's, the error
        also says where they are from.
        """
        methods = [getattr(self, name) for name in names]
        known = ("trl.", "transformers.", "d3s_kernels.")
        others = [method for method in methods if not f"{method.__module__}.".startswith(known)]
        paths = [f"{method.__module__}.{getattr(method, '__qualname__', method)}" for method in others]
        hint = f"; it may not come through {' and '.join(paths)}" if paths else ""
        raise UnknownTRL(f"training_step: {message}{hint}")

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *more: Any, **options: Any
    ) -> Scores:
        module = model.model if isinstance(model, OverSets) else model
        model_head = read_head(self.accelerator.unwrap_model(module))  # in each call, since an adapter may be new
        method = super()._get_per_token_logps_and_entropies
        call, inputs = Call(method, model, input_ids, attention_mask, logits_to_keep, more, options), self._loss_inputs
        adds = inputs is not None and updates_alone(self.accelerator)
        head = OurHead(model_head, adds_to_gradients=adds, logits_dtype=self.args.logits_dtype)
        with d3s_head(head):
            if inputs is not None:
                return self._score_for_loss(head, call, inputs)
            if self._passes is not None and self._passes.names:
                return self._score_before_rewards(call, self._passes)
            return self._scores_of_pass(call) if self.model.training else call.scores()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self.model.training:
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            return evaluated
        self._page, every, step = None, self.args.selection_page_steps, self.state.global_step
        if every > 0 and (self._last_page is None or self._last_page // every != step // every):
            self._last_page = step
            self._page = PageOfBatch(step, self.num_generations, self.args.steps_per_generation)
        columns = list(inputs[0]) if self.args.refill else []  # TRL adds what a rollout_func returns to the examples
        batch, postponed = self._scored(inputs)
        if self.args.refill:
            batch = self._refilled(batch, columns)
        if self._page is not None:
            rewards = None if self._rewards is None else total_rewards(self._rewards, self.reward_weights)
            self._page.add_generated(batch, rewards, self.accelerator.process_index, self._tokenizer.pad_token_id)
        batch = self._keep_rollouts(batch)
        self._rollouts_were_chosen = True
        for name in postponed:
            batch |= self._postponed(name, batch)
        if self.args.off_policy_rule != "none" and OLD not in batch:
            batch |= self._postponed(OLD, batch)
        if self._tokens_before_update:
            self._choose_tokens_of_batch(batch)
        batch.pop(DRAWS, None)
        return batch

    def _scored(self, inputs: list[dict[str, Any]]) -> tuple[Batch, Iterable[str]]:
        """Lets TRL make a generation batch from the prompts in ``inputs``. Returns the batch, and the names of
        postponed passes.
        """
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

    def _add_sets(self, batch: Batch) -> None:
        """Adds the recorded sets to a generation batch, and logs their metrics."""
        if self._recorded is None:
            raise RuntimeError("sampling_mask: no sets were recorded; takes completions of _generate_single_turn")
        mask = loss_mask(batch).bool()
        recorded, self._recorded = self._recorded.in_columns(mask.shape[1]), None
        batch[SETS] = recorded.sets
        sums = set_sums((recorded.sets >= 0).sum(2), mask, self.args.max_kept, recorded.log_mass)
        self._log(set_metrics(self.accelerator.reduce(sums, reduction="sum"), self._vocabulary))

    def _refilled(self, batch: Batch, columns: list[str]) -> Batch:
        """Replaces the groups whose rewards are all equal, at most ``refill`` times. Groups do not move between ranks.
        All ranks have all rewards, so they make the same decisions without further communication. ``columns`` are those
        of the data set.
        """
        accelerator, n, dataset = self.accelerator, self.num_generations, self.train_dataset
        if "num_images" in batch or not hasattr(dataset, "__len__") or self._rewards is None:
            raise ValueError(
                "refill: takes prompts without images, a data set with a length, and rewards of TRL's reward functions"
            )
        ranks, here, times = accelerator.num_processes, accelerator.process_index, 0
        equal = equal_before = self._equal_rewards(self._rewards)
        while times < self.args.refill and bool(equal.any()):
            rewards, missing = self._rewards, int(equal.view(ranks, -1).sum(dim=1).amax())
            seeds, logged = (self.args.seed, self.state.global_step, times), take_logged(self._logs)
            more, _ = self._scored(other_prompts(dataset, columns, missing, n, ranks, here, *seeds))
            groups = replacements(equal.view(ranks, -1), self._equal_rewards(self._rewards).view(ranks, -1))
            rows = rows_of(groups, n)
            batch = take(joined(batch, more, self._tokenizer.pad_token_id), rows[here])
            log_again(self._logs, logged, rows, missing * n)
            both = torch.cat([part.view(ranks, -1, part.shape[1]) for part in (rewards, self._rewards)], dim=1)
            self._rewards = both[torch.arange(ranks, device=rows.device).unsqueeze(1), rows].flatten(0, 1)
            equal, times = self._equal_rewards(self._rewards), times + 1
        refilled = (equal_before & ~equal).sum().double()
        self._log({"d3s/refills": torch.full_like(refilled, times), "d3s/groups_refilled": refilled})
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

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **options)
        if self.model.training:
            self._rewards = rewards
        return rewards

    def _equal_rewards(self, rewards: Tensor) -> Tensor:
        """Returns the mask, bool ``[groups]``, of groups with equal rewards. ``rewards`` has a column per function."""
        separately = self.multi_objective_aggregation == "normalize_then_sum"
        return without_spread(rewards, self.reward_weights, self.num_generations, separately)

    def _keep_rollouts(self, batch: Batch) -> Batch:
        """Chooses the rollouts, and where to cut them. Returns a batch of only the kept rows, with the same number of
        rows on each process.
        """
        accelerator, own_advantages = self.accelerator, batch["advantages"]
        if own_advantages.dim() != 1:
            shape, rows = list(own_advantages.shape), len(own_advantages)
            raise TypeError(f"advantages: got shape {shape}; takes one for each rollout, [{rows}]")
        ranks, here, n = accelerator.num_processes, accelerator.process_index, self.num_generations
        has_images = own_advantages.new_tensor([float("num_images" in batch)])
        message = torch.cat([own_advantages.float(), loss_mask(batch).sum(dim=1).float(), has_images])
        everyones = accelerator.gather(message).view(ranks, -1)  # all that the choice needs, in one collective
        advantages, lengths = (part.reshape(-1, n) for part in everyones[:, :-1].chunk(2, dim=1))
        rewards, self._rewards = self._rewards, None
        # There are no rewards if a subclass computes advantages in another way.
        equal = groups_without_spread(advantages) if rewards is None else self._equal_rewards(rewards)
        total = None if rewards is None else total_rewards(rewards, self.reward_weights).view(-1, n)
        if rewards is not None and not self.args.keep_all:  # TRL's advantages of equal rewards are rounding errors
            advantages = advantages.masked_fill(equal.unsqueeze(1), 0.0)
        _, number = self._selection.number_of_rollouts(self._progress, len(advantages), n, self._multiple)
        keeps_all = number == advantages.numel() and self.args.group_variance_mass is None
        if keeps_all:
            kept = torch.ones_like(lengths, dtype=torch.bool)
        else:
            moves = ranks == 1 or not bool(everyones[:, -1].any())  # rows with images do not move between ranks
            kept = self._selection.rollouts(
                advantages, self._progress, has_tokens=lengths > 0, rewards=total, multiple_of=self._multiple,
                ranks=None if moves else ranks, generator=self._draws_of_step(advantages.device),
            )  # fmt: skip
        asked = self._budget().rollouts / n
        self._log(rollout_metrics(kept.flatten(), lengths.flatten(), equal, kept.any(dim=1), asked))
        if self.args.drop_shared_tokens:
            batch[SHARED] = self._shared_with_right_ones(batch, advantages)
        if self._selection.cuts:
            batch[DRAWS] = self._draws_of_rollouts(own_advantages)
        # With several aggregated rewards, TRL divides by the deviation of the batch, whatever ``scale_rewards`` is.
        scale: Scale = self.scale_rewards if self.multi_objective_aggregation == "sum_then_normalize" else "batch"
        scored = kept if total is None else kept & ~total.isnan()  # without a reward, an advantage is 0 and stays it
        anew = self._selection.advantages(advantages, scored, scale=scale, without_spread=equal)
        batch["advantages"] = anew.view(ranks, -1)[here]
        if not keeps_all:  # otherwise no row moves, and no host sync is needed
            batch = keep_rollouts(batch, kept.view(ranks, -1)[here], self._tokenizer.pad_token_id, self._process_group)
        if self._selection.cuts and self.args.off_policy_rule == "none":  # before the passes, which then forward less
            self._cut_sequences(batch, loss_mask(batch).bool())
        if not keeps_all or self.args.refill:
            may_cut = self._may_cut(batch["prompt_mask"].shape[1] + batch["completion_mask"].shape[1])
            batch = trimmed(batch, self.pad_to_multiple_of, may_cut)
        batch["num_items_in_batch"] = accelerator.gather(loss_mask(batch).sum()).sum()
        if SHARED in batch:
            self._log({SHARED_SHARE: accelerator.gather(batch[SHARED].sum()).sum() / batch["num_items_in_batch"]})
        return batch

    def _shared_with_right_ones(self, batch: Batch, advantages: Tensor) -> Tensor:
        """Marks the shared tokens of this process's rows. ``advantages`` are those of all processes, ``[groups, n]``.
        If a group may lie on two processes, the processes gather the tokens of all rows.
        """
        ids, mask, here = batch["completion_ids"], loss_mask(batch).bool(), self.accelerator.process_index
        rows = slice(here * len(ids), (here + 1) * len(ids))
        if len(ids) % advantages.shape[1] == 0:
            return shared_tokens(ids, advantages.flatten()[rows].view(-1, advantages.shape[1]), mask)
        own = self.accelerator.pad_across_processes(ids.masked_fill(~mask, -1), dim=1, pad_index=-1)
        everyones = self.accelerator.gather(own)
        return shared_tokens(everyones, advantages, everyones >= 0)[rows, : ids.shape[1]]
