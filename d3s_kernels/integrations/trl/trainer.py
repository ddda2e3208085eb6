"""``GRPOTrainer`` with D3S's choice of rollouts and tokens between generation and update.

The methods are in the order of a training step: TRL makes a generation batch, and rollouts are chosen from it; passes
without gradient score the batch; tokens may be chosen; micro-batches are divided; the loss is computed. :mod:`.step`
has the values that one part passes to another.

The methods that are overridden are private to TRL and may change without notice, and a subclass may override them too.
In both cases, the gradient could be wrong without an error. So this package's ``__init__`` checks TRL's version,
:class:`.step.Passes` checks which passes TRL makes over a generation batch, and ``training_step`` checks in each step
that the selection was applied. ``tests/trainers/trl_surface.py`` lists what we rely on.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import disable_gradient_checkpointing, use_adapter

from ..._lm_head.forward import HostNumber
from ..._lm_head.from_model import read_head
from ...off_policy.trusted_tokens import TrustedTokens
from ...rollouts.select_rollouts import Scale, groups_without_spread
from ...selection.loss_weights import DENOMINATORS, gradient_weights, only_through
from ...selection.metrics import SHARED_SHARE, padding_metrics, rollout_metrics, set_metrics, set_sums
from ...selection.selection import Selection
from ...support.recorder import Recorded, recording
from ...tokens.random_prefixes import Prefixes
from ...tokens.select_tokens import TokenSelection
from ...tokens.shared_tokens import shared_tokens
from .._transformers import RunWithBudget, total_rewards, without_spread
from .batch import (
    DRAWS,
    IMAGES,
    PREFIX,
    PREFIX_WEIGHT,
    SETS,
    SHARED,
    UNMEASURED,
    Batch,
    both_sides,
    concatenated,
    joined,
    keep_rollouts,
    loss_mask,
    take,
)
from .columns import (
    MayCut,
    all_trimmed,
    cut,
    divided_by_work,
    last_columns,
    limit_of_columns,
    row_lengths,
    trimmed,
    what_may_be_cut,
)
from .config import D3SConfig
from .counts import CountsTokens, means
from .espo import as_espo
from .head import OurHead, OverSets, check_head, over_sets, updates_alone
from .page import PageOfBatch
from .refill import log_again, other_prompts, replacements, rows_of, take_logged
from .step import (
    OLD,
    RATIO,
    REFERENCE,
    Call,
    Choice,
    Generated,
    Generating,
    Loss,
    Now,
    OptimizerStep,
    Passes,
    Scores,
    UnknownTRL,
)

LOGPROB = "d3s_logprob"  # a batch field: the log-probabilities of the pass for entropies
ASKED = "d3s_token_share_asked"  # a batch field: the budget's share of tokens when the tokens were chosen
SHARE = "d3s_share_of_rows"  # a batch field: the micro-batch's number of rows / the mean number of all micro-batches


class BeginStep(TrainerCallback):
    """Calls a function when an optimizer step begins, even if the previous step was not completed."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._function()


class D3STrainer(CountsTokens, RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
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

    args: D3SConfig
    rollout_func: Callable[..., Any] | None
    epsilon_low: Any  # a float, as in TRL; while TRL computes ESPO's loss, a tensor with a value for each token
    epsilon_high: Any
    _now = Now()  # replaced, never changed
    _weights: dict[str, list[Any]]  # the weights of the next log's values, by the name of the metric
    _wider_bounds = (
        "those of off_policy_rule, or vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max"
    )

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: D3SConfig | None = None, *more: Any, **options: Any
    ) -> None:
        if args is not None and not isinstance(args, D3SConfig):
            raise TypeError(f"args: got a {type(args).__name__}; takes a D3SConfig")
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = D3SConfig(f"{name.split('/')[-1]}-D3S")
        self._weights = defaultdict(list)
        super().__init__(model, reward_funcs, args, *more, **options)
        self.add_callback(BeginStep(self._begin_step))
        if self.rollout_func is not None:
            self.rollout_func = self._with_whole_logprobs(self.rollout_func)
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

    def _with_whole_logprobs(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a ``rollout_func``. If the log-probabilities are read, refuses rows with too few or too many of them.
        TRL pads short rows with 0, as if these tokens had been sampled with the probability 1.
        """

        @wraps(rollout_func)
        def generate(prompts: list[Any], trainer: Any) -> Any:
            output = rollout_func(prompts, trainer)
            read = self.args.off_policy_rule != "none" or self.off_policy_mask_threshold is not None
            rows = (output.get("logprobs") if read or self._corrects_sampling else None) or []
            for row, (logprobs, ids) in enumerate(zip(rows, output.get("completion_ids", []), strict=False)):
                if len(logprobs) != len(ids):
                    raise ValueError(
                        f"rollout_func: got {len(logprobs)} logprobs for {len(ids)} completion_ids of rollout {row}; "
                        "takes one for each, which is None where it is not known"
                    )
            return output

        return generate

    # ---- what is known of a run --------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def _espo(self) -> bool:
        return self.args.importance_sampling_level == "entropy_group"

    @property
    def _corrects_sampling(self) -> bool:
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    @property
    def _tokens_before_update(self) -> bool:
        if self.args.entropy_from == "auto":
            known = self.args.off_policy_rule != "none" or self.args.token_rule == "prefix"
            return known or OLD in self._pass_names()
        return self.args.entropy_from == "rollout"

    @property
    def _entropies_before_update(self) -> bool:
        """Returns whether entropies are computed before the update: to choose tokens before the update, or for ESPO."""
        return self._tokens_before_update and (self.args.token_rule != "prefix" or self._espo)

    def _may_cut(self, columns: int) -> MayCut:
        return what_may_be_cut(self.model.config.get_text_config(), columns)

    def _tokens_are_independent(self, inputs: Batch) -> bool:
        """Returns whether each token's gradient depends only on the token's own log-probability. If so, dropped tokens
        need not be scored.
        """
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

    # ---- a step, and what TRL's code is told within it ---------------------------------------------------------------

    def train(self, *arguments: Any, **options: Any) -> Any:
        self._now = self._now._replace(last_page=None)  # a new run starts new pages
        return super().train(*arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        before = self._now.selections
        loss: Tensor = super().training_step(*arguments, **options)
        if not self._now.rollouts_chosen:
            self._raise_not_covered(
                ("_prepare_inputs", "_generate_and_score_completions"),
                "no rollouts were chosen for this step. Its batch has to come from "
                "D3STrainer._generate_and_score_completions",
            )
        if self._now.selections == before:
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

    def _begin_step(self) -> None:
        self._now = self._now._replace(optimizer_step=OptimizerStep())

    @contextmanager
    def _within(self, part: Generating | Loss) -> Iterator[None]:
        """A context in which TRL's code runs. The methods of ours that TRL calls can read ``part``."""
        before = self._now.within
        self._now = self._now._replace(within=part)
        try:
            yield
        finally:
            self._now = self._now._replace(within=before)

    # ---- a generation batch: made, refilled, and its rollouts chosen -------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self.model.training:
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            return evaluated
        page = self._page_of_this_step()
        columns = list(inputs[0]) if self.args.refill else []  # TRL adds the results of a rollout_func to the examples
        made = self._generated(inputs)
        if self.args.refill:
            made = self._refilled(made, columns)
        if page is not None:
            rewards = None if made.rewards is None else total_rewards(made.rewards, self.reward_weights)
            page.add_generated(made.batch, rewards, self.accelerator.process_index, self._tokenizer.pad_token_id)
        batch = self._keep_rollouts(made.batch, made.rewards)
        for name in made.postponed:
            batch |= self._postponed(name, batch)
        if self.args.off_policy_rule != "none" and OLD not in batch:
            batch |= self._postponed(OLD, batch)
        if self._tokens_before_update:
            self._choose_tokens_of_batch(batch)
        batch.pop(DRAWS, None)
        self._now = self._now._replace(rollouts_chosen=True, page=page)
        return batch

    def _page_of_this_step(self) -> PageOfBatch | None:
        every, step, last = self.args.selection_page_steps, self.state.global_step, self._now.last_page
        if every <= 0 or (last is not None and last // every == step // every):
            return None
        self._now = self._now._replace(last_page=step)
        return PageOfBatch(step, self.num_generations, self.args.steps_per_generation)

    def _generated(self, inputs: list[dict[str, Any]]) -> Generated:
        """Lets TRL make a generation batch from the prompts in ``inputs``."""
        making = Generating(Passes(self._pass_names()))
        with self._within(making):
            batch: Batch = super()._generate_and_score_completions(inputs)
        passes = making.passes
        batch = passes.without_postponed(batch)
        if passes.entropy is not None:
            batch["d3s_entropy"] = passes.entropy
        if self.args.sampling_mask:
            self._add_sets(batch, making.recorded)
        return Generated(batch, making.rewards, tuple(passes.postponed))

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> tuple[list[list[int]], Any]:
        generate, making = super()._generate_single_turn, self._now.within
        if not (self.args.sampling_mask and isinstance(making, Generating)):
            completions, logprobs = generate(*arguments, **options)
            return completions, logprobs
        with recording(self.accelerator.unwrap_model(self.model), self.args.max_kept) as recorder:
            completions, _ = generate(*arguments, **options)
        making.recorded = recorder.recorded(completions)
        rows = zip(making.recorded.logprob.tolist(), completions, strict=True)
        return completions, [row[: len(tokens)] for row, tokens in rows]

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **options)
        if isinstance(self._now.within, Generating):
            self._now.within.rewards = rewards
        return rewards

    def _add_sets(self, batch: Batch, recorded: Recorded | None) -> None:
        """Adds the recorded sets to a generation batch, and logs their metrics."""
        if recorded is None:
            raise RuntimeError("sampling_mask: no sets were recorded; takes completions of _generate_single_turn")
        mask = loss_mask(batch).bool()
        of_columns = recorded.in_columns(mask.shape[1])
        batch[SETS] = of_columns.sets
        sums = set_sums((of_columns.sets >= 0).sum(2), mask, self.args.max_kept, of_columns.log_mass)
        self._log(set_metrics(self.accelerator.reduce(sums, reduction="sum"), self._vocabulary))

    def _refilled(self, made: Generated, columns: list[str]) -> Generated:
        """Replaces the groups whose rewards are all equal, at most ``refill`` times. Groups do not move between ranks.
        All ranks have all rewards, so they make the same decisions without further communication. ``columns`` are the
        columns of the data set.
        """
        accelerator, n, dataset = self.accelerator, self.num_generations, self.train_dataset
        ranks, here, times = accelerator.num_processes, accelerator.process_index, 0
        rewards = self._rewards_of_refill(made)
        equal = equal_before = self._equal_rewards(rewards)
        while times < self.args.refill and bool(equal.any()):
            missing = int(equal.view(ranks, -1).sum(dim=1).amax())
            seeds, logged = (self.args.seed, self.state.global_step, times), take_logged(self._logs)
            more = self._generated(other_prompts(dataset, columns, missing, n, ranks, here, *seeds))
            further = self._rewards_of_refill(more)
            groups = replacements(equal.view(ranks, -1), self._equal_rewards(further).view(ranks, -1))
            rows = rows_of(groups, n)
            batch = take(joined(made.batch, more.batch, self._tokenizer.pad_token_id), rows[here])
            log_again(self._logs, logged, rows, missing * n)
            both = torch.cat([part.view(ranks, -1, part.shape[1]) for part in (rewards, further)], dim=1)
            rewards = both[torch.arange(ranks, device=rows.device).unsqueeze(1), rows].flatten(0, 1)
            made = made._replace(batch=batch, rewards=rewards)
            equal, times = self._equal_rewards(rewards), times + 1
        refilled = (equal_before & ~equal).sum().double()
        self._log({"d3s/refills": torch.full_like(refilled, times), "d3s/groups_refilled": refilled})
        return made

    def _rewards_of_refill(self, made: Generated) -> Tensor:
        if "num_images" in made.batch or not hasattr(self.train_dataset, "__len__") or made.rewards is None:
            raise ValueError(
                "refill: takes prompts without images, a data set with a length, and rewards of TRL's reward functions"
            )
        return made.rewards

    def _equal_rewards(self, rewards: Tensor) -> Tensor:
        """Returns the mask, bool ``[groups]``, of groups with equal rewards. ``rewards`` has a column per function."""
        separately = self.multi_objective_aggregation == "normalize_then_sum"
        return without_spread(rewards, self.reward_weights, self.num_generations, separately)

    def _keep_rollouts(self, batch: Batch, rewards: Tensor | None = None) -> Batch:
        """Chooses the rollouts, and where to cut them. Returns a batch of only the kept rows, with the same number of
        rows on each process. ``rewards`` is from :class:`Generated`. If it is None, equal advantages show which groups
        have equal rewards.
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
        scored = kept if total is None else kept & ~total.isnan()  # without a reward, an advantage is 0 and stays 0
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
        """Marks the shared tokens of this process's rows. ``advantages``, ``[groups, n]``, are from all processes. If a
        group may lie on two processes, the processes gather the tokens of all rows.
        """
        ids, mask, here = batch["completion_ids"], loss_mask(batch).bool(), self.accelerator.process_index
        rows = slice(here * len(ids), (here + 1) * len(ids))
        if len(ids) % advantages.shape[1] == 0:
            return shared_tokens(ids, advantages.flatten()[rows].view(-1, advantages.shape[1]), mask)
        own = self.accelerator.pad_across_processes(ids.masked_fill(~mask, -1), dim=1, pad_index=-1)
        everyones = self.accelerator.gather(own)
        return shared_tokens(everyones, advantages, everyones >= 0)[rows, : ids.shape[1]]

    def _cut_sequences(self, batch: Batch, mask: Tensor | TrustedTokens) -> None:
        """Cuts sequences at random. A row's cut depends only on the row's random number, not on the process that has
        the row.
        """
        cut = self._selection.prefixes(mask, self._progress, draws=batch[DRAWS])
        batch[PREFIX], batch[PREFIX_WEIGHT] = cut.mask, cut.weight

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *more: Any, **options: Any
    ) -> Scores:
        call, within = self._call(model, input_ids, attention_mask, logits_to_keep, *more, **options), self._now.within
        if isinstance(within, Loss) and within.scores is not None and within.call.is_like(call):
            self._now = self._now._replace(within=within._replace(scores=None))
            return within.scores
        if isinstance(within, Generating) and within.passes.names:
            return self._score_before_rewards(call, within.passes)
        return self._scores_of_pass(call) if self.model.training else call.scores()

    def _call(self, model: Any, tokens: Tensor, attention: Tensor, columns: int, *more: Any, **options: Any) -> Call:
        """Returns a call of TRL's method, with our head in the model."""
        model, sets = (model.model, model.sets) if isinstance(model, OverSets) else (model, None)
        known = read_head(self.accelerator.unwrap_model(model))  # in each call, since an adapter may be new
        head = OurHead(known, options=self.args)
        method = super()._get_per_token_logps_and_entropies
        return Call(method, head, model, sets, None, tokens, attention, columns, more, options)

    def _pass_names(self) -> list[str]:
        """Returns the names of the passes without gradient that TRL makes over a generation batch. The conditions are
        the same as TRL's.
        """
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        names = [] if aligned and not self._corrects_sampling else [OLD]
        return names if self.beta == 0 else [*names, REFERENCE]

    def _is_reference(self, model: Any) -> bool:
        """Returns whether ``model`` is the reference model: either a model of its own, or the policy with its adapter
        switched off or replaced by the adapter "ref".
        """
        if self.ref_model is not None:
            return bool(model is self.ref_model)
        policy = self.accelerator.unwrap_model(self.model)
        if getattr(policy, "peft_config", None) is None:
            return False
        # ``disable_adapters`` is a property of adapter layers, but a method of transformers' models.
        switched_off = any(getattr(module, "disable_adapters", None) is True for module in policy.modules())
        return switched_off or bool(policy.active_adapter == "ref")

    def _score_before_rewards(self, call: Call, passes: Passes) -> Scores:
        """Handles a pass for which TRL asks before TRL computes rewards. Postpones the pass if only the update needs
        it; otherwise makes it now.
        """
        name = passes.next(self._is_reference(call.model))
        if name != OLD or not self._corrects_sampling:
            return passes.postpone(name, len(call.tokens), call.columns), None, None
        with_entropy = call._replace(options=call.options | {"compute_entropy": self._entropies_before_update})
        logprob, passes.entropy, aux = self._scores_of_pass(with_entropy)
        return logprob, None, aux

    def _scores_of_pass(self, call: Call) -> Scores:
        """Makes a pass without gradient. TRL makes a forward for every ``batch_size`` rows, with all columns. This
        method makes the same number of forwards, but each has rows of similar lengths, and only the columns that these
        rows need. Columns that are cut off get 0.
        """
        options, rows = {"batch_size": None} | call.options, len(call.tokens)
        size = call.more[0] if call.more else options["batch_size"]
        prompt, may_cut = call.tokens.shape[1] - call.columns, self._may_cut(call.tokens.shape[1])
        if (
            size is None
            or rows <= size
            or len(call.more) > 1
            or self.args.order_rows == "none"
            or not may_cut.completions
        ):
            return call.scores()
        batch = {name: value for name, value in options.items() if name in IMAGES and value is not None}
        batch |= {"prompt_ids": call.tokens[:, :prompt], "prompt_mask": call.attention[:, :prompt]}
        batch |= {"completion_ids": call.tokens[:, prompt:], "completion_mask": call.attention[:, prompt:]}
        if call.sets is not None:
            batch[SETS] = call.sets
        options = {name: value for name, value in options.items() if name not in (*IMAGES, "batch_size")}
        logprob, entropy = [], []
        parts = divided_by_work(row_lengths(batch), -(-rows // size), prompt, may_cut, self.pad_to_multiple_of)
        for part in parts:
            chunk = cut(take(batch, part.rows), part.prompt_width, part.width)
            images = {name: chunk[name] for name in IMAGES if name in chunk}
            columns = chunk["completion_ids"].shape[1]
            tokens, attention = both_sides(chunk)
            scores = call._replace(
                sets=chunk.get(SETS), tokens=tokens, attention=attention, columns=columns, more=(),
                options=options | images,
            ).scores()  # fmt: skip
            logprob.append(pad(scores[0], (0, call.columns - columns)))
            if scores[1] is not None:
                entropy.append(pad(scores[1], (0, call.columns - columns)))
        back = torch.cat([part.rows for part in parts]).argsort()
        return torch.cat(logprob)[back], torch.cat(entropy)[back] if entropy else None, None

    def _postponed(self, name: str, batch: Batch) -> Batch:
        """Makes a postponed pass over the chosen rollouts. Returns the batch fields that the pass fills."""
        if name == OLD:
            logprob, entropy, _ = self._score(self.model, batch, compute_entropy=self._entropies_before_update)
            return {name: logprob} if entropy is None else {name: logprob, "d3s_entropy": entropy}
        if self.ref_model is not None:
            return {name: self._score(self.ref_model, batch)[0]}
        policy = self.accelerator.unwrap_model(self.model)  # the reference is the policy with adapter "ref" or none
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return {name: self._score(self.model, batch)[0]}

    def _score(self, model: Any, batch: Batch, **options: Any) -> Scores:
        """Runs TRL's scoring pass over the rows of a batch, without gradient. Tokens after a cut are not forwarded if
        the update does not need them.
        """
        all_columns = batch["completion_ids"].shape[1]
        if PREFIX in batch and self._tokens_are_independent(batch):
            rest = last_columns(batch[PREFIX]).unsqueeze(1) <= torch.arange(all_columns, device=batch[PREFIX].device)
            batch = batch | {"completion_mask": batch["completion_mask"].masked_fill(rest, 0)}
            batch = trimmed(batch, self.pad_to_multiple_of, self._may_cut(batch["prompt_mask"].shape[1] + all_columns))
        tokens, attention = both_sides(batch)
        images = {name: batch[name] for name in IMAGES if name in batch}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            scores: Scores = self._get_per_token_logps_and_entropies(
                over_sets(model, batch.get(SETS)), tokens, attention, batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size, **images, **options,
            )  # fmt: skip
        if (after := all_columns - batch["completion_ids"].shape[1]) == 0:
            return scores
        logprob, entropy, aux = scores
        return pad(logprob, (0, after)), None if entropy is None else pad(entropy, (0, after)), aux

    # ---- tokens, if they are chosen before the update ----------------------------------------------------------------

    def _choose_tokens_of_batch(self, batch: Batch) -> None:
        """Chooses the tokens of a whole generation batch, and stores the choice in the batch."""
        mask, ratio, rule = loss_mask(batch).bool(), batch.get(RATIO), self.args.off_policy_rule
        log_p, log_q, group = batch.get(OLD), batch.get("sampling_per_token_logps"), self._process_group
        if log_q is None and rule != "none":
            raise ValueError(
                f"off_policy_rule: got {rule!r}, and completions without the log-probabilities that they were sampled "
                "with; takes use_vllm, sampling_mask, or a rollout_func that returns them"
            )
        trusted = self._selection.trusted(log_p, log_q, batch["advantages"], mask=mask, process_group=group)
        if ratio is not None and self._tokens_are_independent(batch):  # TRL multiplies each token's loss by the ratio
            trusted = trusted.only(weighted(batch, trusted.mask))
        left = trusted.only(without_shared(batch, trusted.mask))
        if self._selection.cuts and PREFIX not in batch:
            self._cut_sequences(batch, left)
        if "d3s_entropy" not in batch:
            batch |= self._entropy_pass(batch)
        elif PREFIX in batch:
            batch[UNMEASURED] = mask & ~batch[PREFIX]
        # The entropy pass skips only rollouts whose tokens have scores that do not depend on entropies. These tokens
        # still count as valid tokens.
        candidates = self._prefixes(batch, left.mask) if PREFIX in batch else left
        entropy = batch.get("d3s_entropy", torch.zeros(mask.shape, device=mask.device))  # rule "prefix" reads none
        chosen = self._choose_tokens(entropy, batch["advantages"], candidates)
        batch["d3s_kept"], batch["d3s_threshold"] = chosen.mask, chosen.threshold
        weight = left.weight if chosen.weight is None else left.weight * chosen.weight
        batch["d3s_trusted"], batch["d3s_weight"] = trusted.mask, weight
        share = self._selection.token_share(self._progress)  # the update may be in a later step
        batch[ASKED] = torch.tensor(share, dtype=torch.float64)
        numbers = torch.stack([chosen.mask.sum(), left.mask.sum()])
        batch["d3s_tokens_kept"], batch["d3s_tokens_left"] = self.accelerator.gather(numbers).view(-1, 2).sum(dim=0)

    def _prefixes(self, batch: Batch, mask: Tensor) -> Prefixes:
        """Returns the prefixes of a batch whose sequences were cut, without the tokens outside of ``mask``."""
        prefix = batch[PREFIX] & mask
        return Prefixes(prefix, batch[PREFIX_WEIGHT], prefix.sum())

    def _entropy_pass(self, batch: Batch) -> Batch:
        """Makes an extra pass for the entropies. Returns the batch fields that the pass fills: entropies,
        log-probabilities, and a mask of the tokens whose entropies are not needed. The values of these tokens are 0.
        They are the tokens after a cut, and the tokens of a row with advantage 0, unless tokens are ranked by entropy
        alone. If the rule only cuts sequences, no entropy is needed, and there is no pass.
        """
        mask = loss_mask(batch).bool()
        if self.args.token_rule == "prefix":
            return {UNMEASURED: mask}
        needed = batch.get(PREFIX, mask)
        useful = needed.any(dim=1)
        if self.args.token_rule not in ("entropy", "entropy_quantile"):
            useful &= batch["advantages"] != 0
        # Every process scores the same number of rows, since all processes take part in the forward of a sharded model.
        rows, found = int(self.accelerator.gather(useful.sum()).max()), torch.zeros(2, *mask.shape, device=mask.device)
        if rows > 0:
            first = useful.long().argsort(descending=True, stable=True)[:rows]
            logprob, entropy, _ = self._score(self.model, take(batch, first), compute_entropy=True)
            assert entropy is not None  # the entropies were requested
            # Some rows are scored only because all processes have to score the same number of rows. Their entropies
            # are not logged, since a single process would skip them.
            found = found.index_copy(1, first, torch.stack([logprob, entropy]))
        unmeasured = mask & ~(needed & useful.unsqueeze(1))
        return {LOGPROB: found[0], "d3s_entropy": found[1], UNMEASURED: unmeasured}

    def _choose_tokens(
        self, entropy: Tensor, advantages: Tensor, mask: Tensor | TrustedTokens | Prefixes
    ) -> TokenSelection:
        """Chooses this process's tokens: exactly the budget's share of the tokens of all processes, or of each row's
        tokens.
        """
        return self._selection.tokens(entropy, advantages, self._progress, mask=mask, process_group=self._process_group)

    # ---- micro-batches: an optimizer step's have equal work instead of equal numbers of rows -------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        of_trl: Batch = super()._prepare_inputs(generation_batch)
        if not self.model.training or self.args.order_rows == "none":
            return of_trl
        done, waiting = self._now.optimizer_step
        if not waiting:
            # Takes the micro-batches from this one to the last one of the current optimizer step, within the generation
            # batch. They are divided here, not after the generation, because only now it is known where the step ends.
            begin = self._step % self.args.steps_per_generation
            left = max(1, self.current_gradient_accumulation_steps - done)
            waiting = tuple(self._divided(self._buffered_inputs[begin : begin + left]))
        self._now = self._now._replace(optimizer_step=OptimizerStep(done + 1, waiting[1:]))
        return waiting[0]

    def _why_rows_stay(self) -> str | None:
        """Returns why the gradient depends on how rows are divided into micro-batches. Returns None if it does not
        depend on this.
        """
        if DENOMINATORS[self.loss_type] == "process":
            return f"loss_type {self.loss_type!r} is a mean over the tokens of each micro-batch"
        if self._entropy_bonus_enabled:
            return "the entropy bonus is a mean over the tokens of each micro-batch"
        if self.aux_loss_enabled:
            return "the router loss is computed for each micro-batch"
        return None

    def _orders_rows(self) -> bool:
        """Returns whether rows are ordered by length. With "auto", rows are not ordered if each micro-batch chooses its
        own tokens, since then the rows of a micro-batch decide which tokens are kept.
        """
        keeps_all = self._budget().token_ratio == 1 and not self.args.drop_zeros
        same_tokens = keeps_all or self._tokens_before_update
        return self._why_rows_stay() is None and (same_tokens or self.args.order_rows == "work")

    def _divided(self, parts: list[Batch]) -> list[Batch]:
        """Divides the rows of TRL's micro-batches again, into the same number of micro-batches. Cuts each micro-batch
        to the columns that it needs.
        """
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
        """Returns, for each row, the number of columns that are needed: up to the last kept token or, if no tokens were
        chosen yet, up to the cut. Returns None if all tokens are computed.
        """
        needed = batch.get("d3s_kept", batch.get(PREFIX))
        return last_columns(needed) if needed is not None and self._tokens_are_independent(batch) else None

    def _columns_for(self, last: Tensor, prompt: int, columns: int) -> Tensor:
        """Returns how many of the completions' ``columns`` columns are forwarded. ``last`` has the number of columns
        that each row needs. The forward also has the ``prompt`` columns of prompts.
        """
        if not self._may_cut(prompt + columns).completions:
            return torch.full_like(last[0], columns)
        used, multiple = last.amax().clamp(min=1), self.pad_to_multiple_of or 1
        return ((prompt + used + multiple - 1) // multiple * multiple - prompt).clamp(max=columns)

    def _forwarded(self, part: Batch, lengths: Tensor, last: Tensor | None) -> Tensor:
        """Returns int64 ``[2]``: how many tokens, and how many positions, the forward of a micro-batch has."""
        rows, prompt = part["prompt_mask"].shape
        columns = part["completion_mask"].shape[1]
        if last is None:
            return torch.stack([lengths.sum(), lengths.new_tensor(rows * (prompt + columns))])
        forwarded = last > 0  # the other rows are left out; if no row is left, one is forwarded
        width = prompt + self._columns_for(last, prompt, columns)
        tokens = torch.where(forwarded, lengths[0] + last, 0).sum()
        return torch.stack([tokens, forwarded.sum().clamp(min=1) * width])

    def _log_padding(self, before: Tensor, forwarded: Tensor) -> None:
        """Logs how much padding is forwarded, over all processes. ``forwarded``, ``[micro-batches, 2]``, has the
        numbers of tokens and of positions of each micro-batch. ``before``, ``[2]``, has the numbers of tokens and of
        positions of all rows without cuts.
        """
        numbers = torch.cat([before, forwarded.sum(dim=0), forwarded[:, 1].amax().view(1)])
        everyones = self.accelerator.gather(numbers).view(-1, len(numbers))
        self._log(padding_metrics(everyones[:, :4].sum(dim=0), everyones[:, 4].amax()))

    # ---- the loss of a micro-batch -----------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        if not self.model.training:
            evaluated: Tensor = super()._compute_loss(model, inputs)
            return evaluated
        images = {name: inputs[name] for name in IMAGES if name in inputs}
        call = self._call(
            model, *both_sides(inputs), inputs["completion_ids"].size(1), compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled, **images,
        )  # fmt: skip
        known = self._score_for_loss(call, inputs)
        of_trl = self.epsilon_low, self.epsilon_high
        try:
            self.epsilon_low, self.epsilon_high = known.clip_range
            with self._within(known):
                loss: Tensor = super()._compute_loss(model, known.inputs)
        finally:
            self.epsilon_low, self.epsilon_high = of_trl
        # TRL's own code has already caused a host sync, so reading the number does not wait.
        self._count_tokens(known.counted.value())
        # These losses are means over the micro-batch's rows. The other losses divide by a number that is the same for
        # all micro-batches.
        is_mean_of_rows = DENOMINATORS[self.loss_type] in ("sequence", "sequences", "constant")
        return loss * inputs[SHARE] if SHARE in inputs and is_mean_of_rows else loss

    def _score_for_loss(self, call: Call, inputs: Batch) -> Loss:
        """Scores a micro-batch, and chooses its tokens if they are not chosen yet. Hooks on the scores let gradient
        flow only through the kept tokens.
        """
        call.head.adds_to_gradients = updates_alone(self.accelerator)
        call = call._replace(sets=inputs.get(SETS))
        measured = mask = loss_mask(inputs).bool()
        needed = inputs.get("d3s_kept", inputs.get(PREFIX))
        if needed is not None and self._tokens_are_independent(inputs):
            logprob, entropy, aux = self._score_kept(call, inputs, needed)
            if UNMEASURED in inputs or "d3s_entropy" not in inputs:
                measured = needed | (mask & ~inputs.get(UNMEASURED, mask))
        else:
            logprob, entropy, aux = call.scores()
        assert entropy is not None  # the entropies were requested
        constant = entropy.detach()
        chosen = self._choice_of_micro_batch(inputs, constant)
        call.head.kept.number = HostNumber(chosen.kept.sum())
        totals, mean, counted = self._log_tokens(inputs, chosen, mask, constant, measured)
        unknown = mask & ~measured
        entropy = torch.where(unknown, mean, entropy)  # so TRL's mean over all tokens is the mean of known entropies
        page = self._now.page
        if page is not None and page.add_trained(inputs, chosen.kept, constant.masked_fill(unknown, torch.nan)):
            page.write(Path(self.args.output_dir, "selection"), self._tokenizer, self.accelerator.is_main_process)
        self._restrict_gradients(inputs, chosen, logprob, entropy, totals)
        clip_range = self.epsilon_low, self.epsilon_high
        if self._espo:  # changes what TRL's loss reads, not the batch, which may be trained on again
            changed, epsilon = as_espo(inputs, logprob.detach(), constant, self.args, self._vocabulary)
            inputs, clip_range = inputs | changed, (epsilon, epsilon)
        return Loss(call, (logprob, entropy, aux), inputs, clip_range, counted)

    def _choice_of_micro_batch(self, inputs: Batch, entropy: Tensor) -> Choice:
        """Returns the choice that was made before the update, or chooses this process's tokens."""
        if "d3s_kept" in inputs:
            return Choice(*(inputs[f"d3s_{name}"] for name in Choice._fields))
        mask = loss_mask(inputs).bool()
        trusted = weighted(inputs, mask) if self._tokens_are_independent(inputs) else mask
        left = without_shared(inputs, trusted)
        candidates = self._prefixes(inputs, left) if PREFIX in inputs else left
        found = self._choose_tokens(entropy, inputs["advantages"], candidates)
        return Choice(found.mask, found.threshold, 1 if found.weight is None else found.weight, trusted)

    def _restrict_gradients(
        self, inputs: Batch, chosen: Choice, logprob: Tensor, entropy: Tensor, totals: Tensor
    ) -> None:
        """Lets gradient flow only through the kept tokens. ``totals`` has the number of kept tokens, and the number of
        tokens that were left to choose from.
        """
        if not logprob.requires_grad:
            return
        kept = chosen.kept
        policy = bonus = torch.ones((), device=kept.device)
        if self.args.loss_denominator == "kept":
            if "d3s_tokens_kept" in inputs:
                totals = torch.stack([inputs["d3s_tokens_kept"], inputs["d3s_tokens_left"]]).float()
            left = without_shared(inputs, chosen.trusted)
            policy, bonus = gradient_weights(self.loss_type, kept, left, totals)
        select = only_through(kept, policy * chosen.weight)

        def hook(gradient: Tensor) -> Tensor:
            self._now = self._now._replace(selections=self._now.selections + 1)
            return select(gradient)

        logprob.register_hook(hook)  # type: ignore[no-untyped-call]
        if entropy.requires_grad:
            bonus = bonus * inputs.get(PREFIX_WEIGHT, 1)
            entropy.register_hook(only_through(kept, bonus))  # type: ignore[no-untyped-call]

    def _score_kept(self, call: Call, inputs: Batch, kept: Tensor) -> Scores:
        """Scores only the ``kept`` tokens. The forward has only the rows with a kept token, and only the columns up to
        the last kept token. All other tokens get the values of earlier passes. If no token is kept, the first row is
        still scored, because all processes must take part in the forward of a sharded model.
        """
        rows = kept.any(dim=1)
        rows[0] |= ~rows.any()
        place = rows.nonzero()[:, 0]
        prompt = call.tokens.shape[1] - call.columns
        used = int(self._columns_for(last_columns(kept), prompt, call.columns))
        tokens, attention = (part[place, : prompt + used] for part in (call.tokens, call.attention))
        logprob, entropy, aux = call._replace(
            sets=None if call.sets is None else call.sets[place, :used], needed=kept[place, :used],
            tokens=tokens, attention=attention, columns=used,
        ).scores()  # fmt: skip
        assert entropy is not None
        # With these log-probabilities, the ratio of a dropped token is 1. They are 0 if no pass has computed them,
        # because sequences are only cut.
        nothing = torch.zeros(kept.shape, device=kept.device)
        old = inputs[OLD] if OLD in inputs else inputs.get(LOGPROB, nothing)

        def of_all_tokens(scored: Tensor, earlier: Tensor) -> Tensor:
            earlier = torch.where(kept, 0.0, earlier).to(scored.dtype)
            return earlier.index_add(0, place, pad(scored, (0, call.columns - used)))

        return (
            of_all_tokens(logprob, old),
            of_all_tokens(entropy, inputs.get("d3s_entropy", nothing)),
            aux,
        )

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Returns TRL's mask in evaluation. In training, returns a mask of all tokens, since our choice of tokens is
        used instead of TRL's mask.
        """
        if isinstance(self._now.within, Loss):
            return mask.bool()
        theirs: Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        return theirs

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def _log_tokens(
        self, inputs: Batch, chosen: Choice, mask: Tensor, entropy: Tensor, measured: Tensor
    ) -> tuple[Tensor, Tensor, HostNumber]:
        """Logs a micro-batch's token metrics. ``measured`` marks the tokens whose entropies are known, which include
        all kept tokens. Mean entropies are over these tokens. Returns three results over all processes: a tensor with
        the number of kept tokens and the number of tokens that were left to choose from, the mean entropy, and the
        numbers of :class:`Loss`.
        """
        kept, trusted = chosen.kept, chosen.trusted
        totals = self._sum_tokens(
            kept, mask, entropy, inputs["advantages"].unsqueeze(1), without_shared(inputs, trusted),
            weighted(inputs, trusted), measured,
        )  # fmt: skip
        number, number_all, _, number_measured, entropy_kept, entropy_dropped, number_left, *of_weights = totals
        asked = float(inputs[ASKED]) if ASKED in inputs else self._selection.token_share(self._progress)
        may_be_off_policy = self.args.off_policy_rule != "none" or RATIO in inputs
        metrics, weights = self._metrics_of(totals, chosen.threshold, asked, may_be_off_policy)
        rows = number.new_tensor(len(kept))
        of_ratios = number_all if self.importance_sampling_level == "token" or self._espo else rows
        weights |= {
            "entropy": number_measured, "kl": number_all, "cispo_clip_ratio": of_ratios, "vespo/phi_seq_mean": rows,
            **{f"clip_ratio/{part}_mean": of_ratios for part in ("low", "high", "region")},
        }  # fmt: skip
        self._log(metrics, weights)
        counted = HostNumber(torch.stack([number, number_all, *of_weights]))
        return torch.stack([number, number_left]).float(), (entropy_kept + entropy_dropped) / number_measured, counted

    def _log(self, metrics: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> None:
        """Stores 0-d tensors for the next log. Only the log causes a host sync. NaN is not logged.

        A logged value is a mean over micro-batches. ``weights`` has, for some metrics, the number of tokens or rows
        over which the micro-batch's value is a mean. Micro-batches may differ in these numbers, so the logged mean is
        weighted by them. ``weights`` may also have TRL's own metrics.
        """
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        for name, weight in (weights or {}).items():
            self._weights[name].append(weight)

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        metrics = self._metrics["train"]
        # During an evaluation, the training metrics are not touched: they wait for the next log of the training.
        if self.model.training and any(name.startswith("d3s/") for name in metrics):
            weights, self._weights = self._weights, defaultdict(list)
            ours = [name for name in metrics if name.startswith("d3s/") or name in weights]
            found = means({name: metrics.pop(name) for name in ours}, weights)
            metrics.update((name, [value]) for name, value in found.items())
        super().log(logs, *more, **options)


def weighted(batch: Batch, mask: Tensor) -> Tensor:
    """Returns ``mask`` without the tokens whose loss is multiplied by 0 in TRL's correction of vLLM's probabilities."""
    return mask & (batch[RATIO] != 0) if RATIO in batch else mask


def without_shared(batch: Batch, mask: Tensor) -> Tensor:
    """Returns ``mask`` without the tokens that the option ``drop_shared_tokens`` leaves out."""
    return mask & ~batch[SHARED] if SHARED in batch else mask
