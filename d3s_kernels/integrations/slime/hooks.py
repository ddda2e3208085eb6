"""The functions that slime and miles call: :mod:`d3s_kernels.integrations.slime` says which option takes which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...rollouts import group_advantages, groups_without_spread, select_rollouts
from .._assumptions import load, require
from .._options import rollouts_of
from .options import D3SOptions
from .tokens import chosen_tokens, require_layout
from .trainers import Trainer

_ADVANTAGE = "d3s_advantage"  # in a sample's metadata
_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")  # those for which rewards are normalised
_EPS = 1e-6  # both trainers add it to the standard deviation


class Hooks:
    """The hooks of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._progress: float | None = None

    def keep_rollouts(self, args: Any, data: list[list[Any]]) -> None:
        """Drops the rollouts that are not chosen, before anything is computed for training.

        For ``--rollout-sample-filter-path``, with :meth:`post_process_rewards` beside it. Advantages come from all
        rollouts of a group, and stay with the samples.

        Args:
            args: the trainer's arguments.
            data: groups of samples; changed in place. A group that keeps no rollout is left out.

        Raises:
            ValueError: a bad option; a trainer's option that does not fit, such as ``global_batch_size``; a rollout of
                several samples.
            RuntimeError: the trainer differs from what is assumed.
        """
        require(self._trainer.table, "keep_rollouts")
        options, scale = D3SOptions.from_args(args), _scale(args)
        if args.log_passrate:  # slime stops with an assertion, miles takes the whole groups alone
            raise ValueError("log_passrate: got True; takes False, because pass rates need all rollouts of a group")
        if any(isinstance(sample, list) for group in data for sample in group):
            raise ValueError(
                "rollouts: got one of several samples (a list in place of a sample); takes one sample each"
            )
        rewards = _rewards(args, [sample for group in data for sample in group])
        offsets = torch.tensor([0, *map(len, data)]).cumsum(0)
        advantages = group_advantages(rewards, offsets=offsets, scale=scale, eps=_EPS)
        keep = rollouts_of(options.rollouts, args.n_samples_per_prompt)
        kept = select_rollouts(
            advantages, keep, rule=options.rollout_rule, offsets=offsets, scope=options.rollout_scope
        )
        _require_whole_steps(args, int(kept.sum()))
        marks = iter(zip(kept.tolist(), advantages.tolist(), strict=True))
        data[:] = [group for group in (_kept_of(group, marks) for group in data) if group]

    def post_process_rewards(self, args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
        """The raw rewards, and the advantages that :meth:`keep_rollouts` left with the samples.

        For ``--custom-reward-post-process-path``. Without it the trainer would normalise what is left of a group.

        Raises:
            ValueError: a sample without an advantage.
            RuntimeError: the trainer differs from what is assumed.
        """
        require(self._trainer.table, "post_process_rewards")
        for sample in samples:
            if _ADVANTAGE not in sample.metadata:
                raise ValueError(
                    f"custom_reward_post_process_path: sample {sample.index} has no advantage; takes samples that "
                    "keep_rollouts has seen: set rollout_sample_filter_path, with a rollout function that calls it"
                )
        raw = [sample.get_reward_value(args) for sample in samples]
        return raw, [sample.metadata[_ADVANTAGE] for sample in samples]

    def has_spread(self, args: Any, samples: list[Any], **_: Any) -> Any:
        """Refuses a group whose rewards are all equal, up to rounding: the trainer samples another prompt for it.

        For ``--dynamic-sampling-filter-path``.

        Returns:
            The trainer's ``DynamicFilterOutput``; dropped groups are counted as ``drop_no_spread``.
        """
        require(self._trainer.table, "has_spread")
        flat = [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
        keep = not bool(groups_without_spread(_rewards(args, flat)))
        output = load(f"{self._trainer.table.package}.rollout.filter_hub.base_types:DynamicFilterOutput")
        return output(keep=keep, reason=None if keep else "no_spread")

    def token_loss(
        self, args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The trainer's policy loss, with the advantage 0 at tokens that are not chosen.

        For ``--custom-loss-function-path`` with ``--loss-type custom_loss``. The denominator stays the number of all
        tokens, and terms for KL and entropy keep all tokens.

        Args:
            batch: a micro-batch; ``advantages`` and ``loss_masks`` are lists with a tensor ``[response]`` each.
            logits: ``[1, T, V]``, or this rank's columns of them.
            sum_of_sample_mean: the trainer's reducer of numbers of all response tokens.

        Returns:
            What the trainer's loss returns, and ``d3s/token_share``: the chosen share, reduced as its metrics are.

        Raises:
            ValueError: a bad option; a trainer's option that does not fit, such as ``context_parallel_size``.
            RuntimeError: the trainer differs from what is assumed.
        """
        require(self._trainer.table, "token_loss")
        options, ranks = D3SOptions.from_args(args), self._trainer.ranks()
        require_layout(args, logits, options, ranks)
        kept = chosen_tokens(args, batch, logits, options, self._token_ratio(options, args), ranks)
        chosen = torch.split(torch.cat(batch["advantages"]) * kept, batch["response_lengths"])
        policy_loss = load(self._trainer.policy_loss)
        loss, metrics = policy_loss(args, {**batch, "advantages": list(chosen)}, logits, sum_of_sample_mean)
        return loss, {**metrics, "d3s/token_share": sum_of_sample_mean(kept.float()).detach()}

    def start_step(self, args: Any, rollout_id: int, *_: Any) -> None:
        """Tells :meth:`token_loss` how much of training is done, for a share of tokens that changes.

        For ``--custom-megatron-before-train-step-hook-path``.
        """
        require(self._trainer.table, "start_step")
        self._progress = min(rollout_id / args.num_rollout, 1.0)

    def _token_ratio(self, options: D3SOptions, args: Any) -> float:
        if options.follows_schedule and self._progress is None:
            raise ValueError(
                f"d3s_token_ratio_end: got {options.token_ratio_end} with d3s_token_ratio_start "
                f"{options.token_ratio_start}; takes the same number, unless "
                "custom_megatron_before_train_step_hook_path is start_step"
            )
        return options.budget(self._progress or 0.0, args.n_samples_per_prompt).token_ratio


def _rewards(args: Any, samples: list[Any]) -> Tensor:
    return torch.tensor([sample.get_reward_value(args) for sample in samples], dtype=torch.float32)


def _scale(args: Any) -> Any:
    """How the trainer would have divided the rewards of a group."""
    if args.advantage_estimator not in _ESTIMATORS:
        takes = ", ".join(map(repr, _ESTIMATORS))
        raise ValueError(f"advantage_estimator: got {args.advantage_estimator!r}; takes {takes}")
    if not args.rewards_normalization:
        raise ValueError("disable_rewards_normalization: got True; takes False: advantages are normalised rewards")
    divides = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    return "group" if divides else "none"


def _require_whole_steps(args: Any, kept: int) -> None:
    """Both trainers drop the rollouts that do not fill a step, and say nothing."""
    if getattr(args, "use_dynamic_global_batch_size", False):  # miles: the step takes what there is
        return
    if kept % args.global_batch_size:
        raise ValueError(
            f"global_batch_size: got {args.global_batch_size}, but {kept} rollouts are kept; takes a divisor of {kept} "
            "(and num_steps_per_rollout, which sets it, is counted without the selection)"
        )


def _kept_of(group: list[Any], marks: Iterator[tuple[bool, float]]) -> list[Any]:
    """The kept samples of the next group, with their advantages."""
    kept = []
    for sample in group:
        keep, advantage = next(marks)
        sample.metadata = {**sample.metadata, _ADVANTAGE: advantage}  # a new one, since samples may share theirs
        if keep:
            kept.append(sample)
    return kept
