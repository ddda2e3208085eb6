"""The trainer modes ``d3s_sync``, ``d3s_colocate_async`` and ``d3s_separate_async``: verl's V1 trainers with updates on
only the chosen rollouts and tokens.

:meth:`D3STrainer._balance_batch` chooses the rollouts. It runs after the rewards and before the old log-probabilities
are computed. :meth:`D3STrainer._compute_advantage` chooses the tokens by the old policy's entropies, which verl stores
together with the old log-probabilities. Both methods run in the driver, on CPU tensors. If rollouts are cut at random,
one of these two methods cuts them; :class:`.cuts.Plan` says which one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from ...off_policy.trusted_tokens import TrustedTokens, weighs
from ...rollouts.select_rollouts import group_advantages, groups_without_spread
from ...selection.metrics import (
    OFF_POLICY_SHARE,
    SHARED_SHARE,
    rollout_metrics,
    set_metrics,
    set_sums,
    token_metrics,
    token_sums,
)
from ...selection.options import options_from
from ...selection.schedule import Budget, progress_of
from ...selection.selection import Selection, in_groups
from ...tokens.random_prefixes import Prefixes
from ...tokens.shared_tokens import shared_tokens
from .checks import require_config, require_head, require_supports, require_used
from .cuts import FIELDS, WEIGHED, WEIGHT, Plan, plan_of, refusals, shortened
from .options import POLICY_LOSS, D3SOptions, Mode
from .rows import rows_of_an_update, sessions
from .sampling_mask import NOTE, field_of

_NORMALISES_GROUPS = ("grpo", "grpo_vectorized")  # estimators: verl's names
# In these losses, a token with advantage 0 still has a gradient.
_NOT_SILENT_AT_ADVANTAGE_0 = ("geo_mean", "dro", "kl_cov")
_LOG_PROBABILITIES = ("old_log_probs", "rollout_log_probs")


class D3STrainer(PPOTrainer):  # type: ignore[misc]  # verl has no types
    """What D3S adds to each of verl's V1 trainers. ``docs/verl.md`` describes the options, which have the mode's name,
    such as ``trainer.v1.d3s_sync``.

    Raises:
        ValueError: a bad or unknown option, or a configuration that the mode does not support; the message names the
            key, the value and the accepted values.

    Example:
        ``python -m verl.trainer.main_ppo trainer.v1.trainer_mode=d3s_sync +trainer.v1.d3s_sync.rollouts_start=4 ...``
    """

    mode: Mode

    def __init__(self, config: Any) -> None:
        self.d3s = options_from(D3SOptions, config.trainer.v1.get(self.mode) or {}, f"trainer.v1.{self.mode}.")
        self._selection = Selection(self.d3s)
        _require(config, self.d3s, self.mode)
        self._plan = plan_of(config, self.d3s)
        # Several parts of verl read the mode: the replay buffer, prompts, refills, checkpoints and local updates.
        with _values(config, {"trainer.v1.trainer_mode": self.mode.removeprefix("d3s_")}):
            super().__init__(config)
        self._rows = (0, 0)  # the numbers of rows before and after the step's selection; (0, 0): no selection yet
        self._tokens_are_chosen = False  # whether this step has chosen its tokens
        self._rows_of_an_update = 0
        self._advantages: dict[str, float] = {}  # the kept rows' advantages, by key
        self._shared: dict[str, Tensor] = {}  # with drop_shared_tokens, which tokens of the rows are shared, by key
        self._equal: set[str] = set()  # the keys of kept rows whose group has equal rewards, up to rounding
        self._weights: dict[str, Tensor] = {}  # the tokens' weights in rows that were cut before the passes, by key
        self._responses: dict[str, Tensor] = {}  # the whole responses of rows that were shortened, by key

    @property
    def _progress(self) -> float:
        return progress_of(self.global_steps - 1, self.total_training_steps)  # verl counts steps from 1

    @property
    def _budget(self) -> Budget:
        return self._selection.budget(self._progress, self.config.actor_rollout_ref.rollout.n)

    def _draws(self, what: Literal["rollouts", "tokens"]) -> torch.Generator:
        """Returns a generator for the rule "random". Its seed depends on the run's seed, the step, the step's local
        update (separate_async has several) and ``what``. So the generator draws the same values again after a resume.
        """
        update = self.global_steps * self.parameter_sync_step + self.local_trigger_step
        seed = 1_000_003 * (self.config.data.get("seed") or 0) + update
        return torch.Generator().manual_seed((2 * seed + (what == "tokens")) % 2**63)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        """Drops rollouts, then lets verl balance the rest. Rollouts are not dropped in ``_compute_reward_colocate``,
        since verl skips that method if separate workers compute the rewards.
        """
        kept = self._keep_rollouts(batch, metrics)
        self._rows = len(batch), len(kept)
        self._weights, self._responses = {}, {}
        if self._selection.cuts and self._plan.before_passes:
            self._cut_rollouts(kept)
        return super()._balance_batch(kept, metrics, **options)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Returns the number of rows of one update. A step makes as many updates as without D3S, each on fewer rows.

        verl pads the batch to a multiple of this number. With verl's own number, ``ppo_mini_batch_size * rollout.n``,
        verl would add padding rows in place of dropped rows, and losses that average over sequences would count these
        padding rows.
        """
        self._require_rollouts()
        config, (rows, kept) = self.config.actor_rollout_ref, self._rows
        # verl makes only full micro-batches of a fixed size, so a rank's number of rows must be a multiple of this
        # size.
        sizes = []
        if not config.actor.use_dynamic_bsz:
            sizes += [config.actor.ppo_micro_batch_size_per_gpu, config.rollout.log_prob_micro_batch_size_per_gpu]
        if not config.ref.log_prob_use_dynamic_bsz:
            sizes += [config.ref.log_prob_micro_batch_size_per_gpu]
        unit = dp_size * math.lcm(*(size for size in sizes if size))
        before = config.actor.ppo_mini_batch_size * config.rollout.n
        self._rows_of_an_update = rows_of_an_update(kept, rows, before, unit)
        return self._rows_of_an_update

    def _require_rollouts(self) -> None:
        """Raises a RuntimeError if this step has chosen no rollouts: another version of verl might not call the methods
        that this class overrides.
        """
        if self._rows == (0, 0):
            raise RuntimeError(f"{self.mode}: no rollouts were chosen in this step: verl has not called _balance_batch")

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Lets verl compute the old log-probabilities. With sampling masks, checks the supports before verl's
        computation, and the entropies after it.
        """
        field = self.d3s.sampling_mask_field
        if field is None:
            return super()._compute_old_log_prob(batch, metrics)
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        rows: dict[str, Any] = {"keys": keys, "partition_id": batch.partition_id}
        data = tq.kv_batch_get(select_fields=["extra_fields", "responses", "response_mask"], **rows)
        parts = (field_of(data, field), data["responses"].unbind(), data["response_mask"].unbind())
        sizes = require_supports(field, dict(zip(keys, zip(*parts, strict=True), strict=True)))
        of_sets = set_metrics(set_sums(sizes, sizes > 0, max(1, int(sizes.amax()))))
        # The probability mass of the supports is not recorded here, so the metric of this mass is NaN and is left out.
        metrics.update(_numbers({name: value for name, value in of_sets.items() if not value.isnan()}))
        batch = super()._compute_old_log_prob(self._noted(batch), metrics)
        require_used(sizes, tq.kv_batch_get(select_fields=["entropy"], **rows)["entropy"].values())
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_ref_log_prob(self._noted(batch), metrics)

    def _noted(self, batch: KVBatchMeta) -> KVBatchMeta:
        """If the batch has sampling masks, writes the name of their field into ``extra_info``, where the workers'
        engine reads the name. Returns the batch.
        """
        if self.d3s.sampling_mask_field is not None:
            batch.extra_info[NOTE] = self.d3s.sampling_mask_field
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Computes the advantages, and chooses the tokens. If ``advantages_from`` is "all", advantages are computed
        over full groups, including the dropped rollouts.
        """
        self._require_rollouts()
        batch = super()._compute_advantage(batch, metrics)
        where: dict[str, Any] = {"keys": batch.keys, "partition_id": batch.partition_id}
        ruled = self.d3s.off_policy_rule != "none"
        names = ["advantages", "entropy", "response_mask", "loss_mask"]
        data = tq.kv_batch_get(select_fields=[*names, *(_LOG_PROBABILITIES if ruled else ())], **where)
        offsets = data["response_mask"].offsets()
        advantages, entropy, mask, loss_mask = (data[name].values() for name in names)
        fields = {}

        if self.d3s.advantages_from == "all":
            by_row = torch.tensor([self._advantages.get(key, 0.0) for key in batch.keys])  # 0 for padding rows
            advantages = by_row.repeat_interleave(offsets.diff()) * mask
            fields = {"advantages": advantages, "returns": advantages}
        elif self._equal:  # verl's advantages of these rows are rounding errors
            spread = torch.tensor([key not in self._equal for key in batch.keys])
            advantages = advantages * spread.repeat_interleave(offsets.diff())
            fields = {"advantages": advantages, "returns": advantages}

        trusted: Any = mask.bool()
        if ruled:
            log_p, log_q = (data[name].values() for name in _LOG_PROBABILITIES)
            trusted = self._selection.trusted(log_p, log_q, advantages, mask=mask, offsets=offsets)
            advantages = advantages * trusted.mask
            fields["advantages"] = advantages
            if weighs(self.d3s.off_policy_rule):
                fields["rollout_is_weights"] = trusted.weight
        on_policy, total = trusted.mask if ruled else trusted, loss_mask.bool().sum()
        if ruled or on_policy.sum() != total:  # verl's rollout correction may have rejected tokens
            metrics[OFF_POLICY_SHARE] = float(1 - on_policy.sum() / total)
        if self.d3s.drop_shared_tokens:
            lengths = zip(batch.keys, offsets.diff().tolist(), strict=True)  # padding rows have no shared tokens
            rows = [self._shared.get(key, torch.zeros(length).bool())[:length] for key, length in lengths]
            others = ~torch.cat(rows)  # a row may have been cut after its shared tokens were found
            metrics[SHARED_SHARE] = float((mask.bool() & ~others).sum() / total)
            trusted = trusted.only(others) if ruled else trusted & others
            advantages = advantages * others
            fields["advantages"] = advantages
        candidates = self._prefixes_of(batch.keys, trusted, offsets) if self._selection.cuts else trusted
        tokens = self._selection.tokens(
            entropy, advantages, self._progress, mask=candidates, offsets=offsets, generator=self._draws("tokens")
        )
        # The selection keeps no token in two cases: no token is trusted; or drop_zeros is on, and within every group
        # all rewards are equal. In these cases all tokens are kept, with advantage 0, since verl would otherwise divide
        # by 0.
        any_kept = bool(tokens.mask.any())
        kept = tokens.mask if any_kept else loss_mask.bool()
        if self.d3s.loss_denominator == "kept":
            # The loss reads response_mask, but divides by the sum of loss_mask.
            fields |= {"response_mask": kept.to(mask.dtype), "loss_mask": kept.to(mask.dtype)}
        else:
            if not self._selection.cuts:  # otherwise, weights of 0 take the place of advantages of 0
                fields["advantages"] = advantages * kept
            if ruled and any_kept:
                fields["response_mask"] = on_policy.to(mask.dtype)
        needed = None
        if isinstance(candidates, Prefixes):
            needed = candidates.mask if self._plan.weighs_others else kept
            everything = loss_mask if self._plan.before_passes else on_policy
            weights = _weights(tokens.weight, candidates.weight, needed, everything, offsets, self._plan)
            fields["rollout_is_weights"] = weights[0] * trusted.weight if ruled else weights[0]
            if self._plan.weighs_others:
                fields[WEIGHT] = weights[1]
            if self._plan.shortens:
                fields["response_mask"] = needed.to(mask.dtype)

        nested = {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in fields.items()}
        tq.kv_batch_put(fields=TensorDict(nested, batch_size=len(batch)), **where)
        if needed is not None and self._plan.shortens:
            self._shorten(batch, needed, offsets)
        sums = token_sums(kept, mask.bool(), entropy, advantages)
        sums[1] += (loss_mask - loss_mask.bool().to(loss_mask.dtype)).sum()  # tokens removed before the passes
        metrics.update(_numbers(token_metrics(sums, tokens.threshold, self._selection.token_share(self._progress))))
        self._tokens_are_chosen = True
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Lets verl update the actor. verl takes ``ppo_mini_batch_size * rollout.n`` rows for one update. During the
        call, these options are set such that the product is the result of :meth:`_get_required_batch_multiple`.
        """
        if not self._tokens_are_chosen:
            raise RuntimeError(
                f"{self.mode}: no tokens were chosen in this step: verl has not called _compute_advantage"
            )
        self._rows, self._tokens_are_chosen = (0, 0), False
        rows = {
            "actor_rollout_ref.actor.ppo_mini_batch_size": self._rows_of_an_update,
            "actor_rollout_ref.rollout.n": 1,
        }
        with _values(self.config, rows):
            batch = super()._update_actor(self._noted(batch), metrics)
        if self._plan.weighs_others and self._selection.cuts and metrics.pop(WEIGHED, None) is None:
            raise RuntimeError(
                f"trainer.v1.{self.mode}.token_rule={self.d3s.token_rule}: the workers have not weighed the KL loss "
                "and the entropy bonus. Load the library in each worker (VERL_USE_EXTERNAL_PLUGINS)"
            )
        if self._responses:  # verl's metrics and dumps read the responses
            fields = list_of_dict_to_tensordict([{"responses": each} for each in self._responses.values()])
            tq.kv_batch_put(keys=list(self._responses), partition_id=batch.partition_id, fields=fields)
        return batch

    def _cut_rollouts(self, batch: KVBatchMeta) -> None:
        """Cuts the kept rollouts at random before any pass over them, and shortens their rows."""
        where: dict[str, Any] = {"keys": batch.keys, "partition_id": batch.partition_id}
        masks = tq.kv_batch_get(select_fields=["response_mask"], **where)["response_mask"].unbind()
        offsets = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
        cut = self._random_prefixes(batch.keys, torch.cat(masks).bool(), offsets)
        self._weights = dict(zip(batch.keys, _rows(cut.weight, offsets), strict=True))
        self._shorten(batch, cut.mask, offsets)

    def _random_prefixes(self, keys: Sequence[str], mask: Tensor | TrustedTokens, offsets: Tensor) -> Prefixes:
        """Cuts rollouts. There is one random number for each kept rollout, in the order of the keys. So the cuts do not
        depend on how verl divides rows among processes, nor on verl's padding rows.
        """
        in_order = sorted(self._advantages)
        rollouts = sessions(in_order)
        numbers = torch.rand(len(rollouts), dtype=torch.float64, generator=self._draws("tokens")).tolist()
        draws = {in_order[row]: number for rows, number in zip(rollouts, numbers, strict=True) for row in rows}
        of_rows = torch.tensor([draws.get(key, 0.0) for key in keys], dtype=torch.float64)
        return self._selection.prefixes(mask, self._progress, offsets=offsets, draws=of_rows)

    def _prefixes_of(self, keys: Sequence[str], mask: Tensor | TrustedTokens, offsets: Tensor) -> Prefixes:
        """Returns the tokens before the cuts. If rollouts were not cut before the passes, they are cut here."""
        if not self._plan.before_passes:
            return self._random_prefixes(keys, mask, offsets)
        lengths = zip(keys, offsets.diff().tolist(), strict=True)
        weight = torch.cat([self._weights.get(key, torch.zeros(length))[:length] for key, length in lengths])
        return Prefixes(weight > 0, weight, (weight > 0).sum())

    def _shorten(self, batch: KVBatchMeta, needed: Tensor, offsets: Tensor) -> None:
        """Shortens the rows in verl's storage: each response ends with its last needed token. At least one token of a
        response remains.
        """
        needed_in = dict(zip(batch.keys, _rows(needed, offsets), strict=True))
        keys = [key for key in batch.keys if key in self._advantages]  # without verl's padding rows
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        names = list(data.keys())
        columns = [data[name].unbind() if isinstance(data[name], Tensor) else list(data[name]) for name in names]
        rows, tags = {}, dict(zip(batch.keys, batch.tags, strict=True))
        for key, *values in zip(keys, *columns, strict=True):
            row, places = dict(zip(names, values, strict=True)), needed_in[key].nonzero()
            length = int(places[-1]) + 1 if len(places) else 1
            if changed := shortened(row, length, self.d3s.sampling_mask_field):
                rows[key] = changed
                self._responses.setdefault(key, row["responses"])
                tags[key] = tags[key] | {"response_len": length, "seq_len": len(row["prompts"]) + length}
        batch.tags = list(tags.values())
        if rows:
            fields, new_tags = list_of_dict_to_tensordict(list(rows.values())), [tags[key] for key in rows]
            tq.kv_batch_put(keys=list(rows), partition_id=batch.partition_id, fields=fields, tags=new_tags)

    def _keep_rollouts(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Chooses the rollouts. Removes the dropped rows from the returned batch and from verl's storage."""
        where: dict[str, Any] = {"keys": batch.keys, "partition_id": batch.partition_id}
        names = ["uid", "rm_scores", "response_mask", *(["responses"] if self.d3s.drop_shared_tokens else [])]
        data = tq.kv_batch_get(select_fields=names, **where)
        scores, uids = data["rm_scores"].unbind(), list(data["uid"])
        rollouts = sessions(batch.keys)
        last = [rows[-1] for rows in rollouts]  # the last output of a rollout has the rollout's reward
        rewards, groups = torch.stack([scores[row].sum() for row in last]), [uids[row] for row in last]

        scaled = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        table, places = in_groups(rewards, groups)  # NaN in the table: a missing rollout or a reward of NaN
        advantages = group_advantages(table, scale="group" if scaled else "none", eps=1e-6)
        advantages = advantages.masked_fill(table.isnan(), torch.nan)
        n = self.config.actor_rollout_ref.rollout.n
        kept = self._selection.rollouts(
            advantages, self._progress, rewards=table, group_size=n, generator=self._draws("rollouts")
        )
        equal, groups_kept = groups_without_spread(table), kept.any(dim=1)
        equal_kept = groups_without_spread(table.masked_fill(~kept, torch.nan)) & (kept.sum(dim=1) > 1)
        no_spread = (equal | equal_kept)[places // table.shape[1]]
        kept, advantages = kept.flatten()[places], advantages.flatten()[places]
        chosen = kept.nonzero().flatten().tolist()
        if not chosen:
            raise ValueError(f"rm_scores: got no finite reward in {len(rollouts)} rollouts; takes at least one")

        if self.d3s.drop_shared_tokens:
            order = [row for rows in rollouts for row in rows]
            ids, masks = (data[name].unbind() for name in ("responses", "response_mask"))
            ends = torch.tensor([0, *(sum(len(ids[row]) for row in rows) for rows in rollouts)]).cumsum(0)
            joined, mask = (torch.cat([part[row] for row in order]) for part in (ids, masks))
            shared = shared_tokens(joined, advantages, mask, groups=groups, offsets=ends)
            parts = torch.split(shared, [len(ids[row]) for row in order])
            self._shared = {batch.keys[row]: part for row, part in zip(order, parts, strict=True)}
        self._advantages = {batch.keys[row]: float(advantages[i]) for i in chosen for row in rollouts[i]}
        algorithm = self.config.algorithm
        of_groups = str(algorithm.adv_estimator) in _NORMALISES_GROUPS and not algorithm.use_kl_in_reward
        self._equal = {batch.keys[row] for i in chosen if of_groups and no_spread[i] for row in rollouts[i]}
        dropped = [key for key in batch.keys if key not in self._advantages]
        if dropped:  # verl later clears only the keys of the returned batch
            tq.kv_clear(keys=dropped, partition_id=batch.partition_id)

        tokens = [int(row.sum()) for row in data["response_mask"].unbind()]
        lengths = torch.tensor([sum(tokens[row] for row in rows) for rows in rollouts])
        asked = self._budget.rollouts / n
        metrics.update(_numbers(rollout_metrics(kept, lengths, equal, groups_kept, asked)))
        # verl's own metrics cover only the kept rollouts, whose scores are extreme. So the mean score of all rollouts
        # is logged too.
        metrics["d3s/score_of_all/mean"] = float(rewards[advantages.isfinite()].mean())
        return batch.select_keys([key for key in batch.keys if key in self._advantages])


@register_trainer("d3s_sync")
class D3STrainerSync(D3STrainer, PPOTrainerSync):  # type: ignore[misc]
    """The mode ``d3s_sync``: verl's synchronous trainer with D3S."""

    mode = "d3s_sync"


@register_trainer("d3s_colocate_async")
class D3STrainerColocateAsync(D3STrainer, PPOTrainerColocateAsync):  # type: ignore[misc]
    """The mode ``d3s_colocate_async``: verl's asynchronous trainer on the rollout's GPUs, with D3S."""

    mode = "d3s_colocate_async"


@register_trainer("d3s_separate_async")
class D3STrainerSeparateAsync(D3STrainer, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """The mode ``d3s_separate_async``: verl's asynchronous trainer on GPUs of its own; each local update makes its own
    choice.
    """

    mode = "d3s_separate_async"


def _require(config: Any, options: D3SOptions, mode: Mode) -> None:
    """Raises a ValueError for a configuration that the trainer does not support."""
    section = f"trainer.v1.{mode}"
    (require_head if options.sampling_mask_field is None else require_config)(config)
    algorithm, policy_loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    estimator, loss = str(algorithm.adv_estimator), policy_loss.get("loss_mode", "vanilla")
    of_groups, or_kept = options.advantages_from == "all", f"or {section}.advantages_from=kept"
    no_critic = "one advantage for a rollout, and no critic"
    correction, rule = algorithm.get("rollout_correction") or {}, options.off_policy_rule
    cuts = Selection(options).cuts
    bypass, weighs_by = correction.get("bypass_mode", False), correction.get("rollout_is")
    reads_log_probs = rule != "none" and not config.actor_rollout_ref.rollout.calculate_log_probs
    has_gradient = options.loss_denominator == "all" and not cuts and loss in _NOT_SILENT_AT_ADVANTAGE_0
    supports, skips = options.sampling_mask_field, OmegaConf.select(config, "skip.rollout_tq.enable")
    for refused, key, value, takes in (
        (
            supports and mode != "d3s_sync", f"{section}.sampling_mask_field", supports,
            "null: verl's client of interrupted rollouts drops the supports",
        ),
        (  # verl would read the number of local updates from the section of our mode
            skips and mode == "d3s_separate_async", "skip.rollout_tq.enable", skips, "False",
        ),
        (bypass, "algorithm.rollout_correction.bypass_mode", bypass, "False: tokens need the old policy's entropy"),
        (
            weighs(rule) and weighs_by, "algorithm.rollout_correction.rollout_is", weighs_by,
            f"null: {section}.off_policy_rule weighs by the same ratios",
        ),
        (
            reads_log_probs, "actor_rollout_ref.rollout.calculate_log_probs", False,
            f"True with {section}.off_policy_rule, which reads them",
        ),
        (config.critic.enable, "critic.enable", config.critic.enable, no_critic),
        (estimator == "gae", "algorithm.adv_estimator", estimator, no_critic),
        (
            of_groups and estimator not in _NORMALISES_GROUPS, "algorithm.adv_estimator", estimator,
            f"'grpo' or 'grpo_vectorized', {or_kept}, with which it takes any without a critic",
        ),
        (
            of_groups and algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward", True,
            f"False, {or_kept}: the divergence of dropped rollouts is not computed",
        ),
        (loss == "d3s", f"{POLICY_LOSS}.loss_mode", loss, f"another one: {mode} chooses the tokens"),
        (
            has_gradient, f"{section}.loss_denominator", "all",
            f"'kept': with {loss}, tokens of advantage 0 have a gradient",
        ),
        *(refusals(config, options.token_rule) if cuts else ()),
    ):  # fmt: skip
        if refused:
            raise ValueError(f"{key}: got {value!r}; {mode} takes {takes}")


@contextmanager
def _values(config: Any, values: dict[str, Any]) -> Iterator[None]:
    """A context in which the configuration has ``values``. When the context ends, the previous values are restored."""
    before = {key: OmegaConf.select(config, key) for key in values}
    try:
        for key, value in values.items():
            OmegaConf.update(config, key, value)
        yield
    finally:
        for key, value in before.items():
            OmegaConf.update(config, key, value)


def _weights(
    policy: Tensor | None, others: Tensor, needed: Tensor, everything: Tensor, offsets: Tensor, plan: Plan
) -> list[Tensor]:
    """Returns two tensors of factors: for the policy loss, and for the KL loss and the entropy bonus. The factors are
    the weights of the cuts, ``policy`` and ``others``. If verl divides a row's loss by the number of ``needed`` tokens,
    the factors also replace this number by the number of tokens in ``everything``.
    """
    of_rows = [torch.segment_reduce(part.float(), "sum", offsets=offsets) for part in (needed, everything)]
    share = (of_rows[0] / of_rows[1].clamp(min=1)).repeat_interleave(offsets.diff())
    assert policy is not None
    pairs = (policy, plan.mean_of_rows), (others, plan.mean_of_rows_of_others)
    return [weight * share if plan.shortens and divides else weight for weight, divides in pairs]


def _rows(values: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values, offsets.diff().tolist())


def _numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
