"""slime and miles: the training gets only the rollouts that D3S keeps, and its loss only their chosen tokens.

Copy this file to a folder that is on the PYTHONPATH of all ranks. Both trainers take the paths of functions, and a file
of options::

    --rollout-sample-filter-path d3s_slime.keep_rollouts
    --custom-reward-post-process-path d3s_slime.post_process_rewards  # always together with the line above
    --custom-config-path d3s.yaml  # d3s_rollouts_start: 8, and so on

Tokens, in slime; for miles, ``d3s_miles.py`` has them. With one training step for each rollout step, slime leaves out
the pass before the update, whose entropies are needed, unless the loss is a "custom_loss", here slime's own::

    --use-rollout-entropy --rollout-data-postprocess-path d3s_slime.choose_tokens
    --loss-type custom_loss --custom-loss-function-path slime.backends.megatron_utils.loss.policy_loss_function

``d3s_slime_head.py`` has an update of slime without logits. The signatures were read in slime at 624b824 and in miles
at 31f1ca9, 2026-08-21.
"""

from importlib import import_module
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import d3s_kernels as d3s

SLIME = "slime.backends.megatron_utils"
BY_TOKEN = ("none", "token_mask", "token_truncate")  # rules that read only a token's own ratio
NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")  # estimators whose rewards are normalised


def selection_of(args: Any) -> d3s.Selection:
    """The selection that the trainer's arguments ask for. ValueError: a bad or unknown option ``d3s_...``."""
    given = {name.removeprefix("d3s_"): value for name, value in vars(args).items() if name.startswith("d3s_")}
    shared = given.get("drop_shared_tokens", False)
    require(shared is False, "d3s_drop_shared_tokens", shared, "false: a rank may have parts of groups")
    return d3s.Selection.from_mapping(given, "d3s_")


def require(fits: bool, name: str, given: Any, takes: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {given!r}; takes {takes}")


def keep_rollouts(args: Any, data: list[list[Any]]) -> None:
    """Drops rollouts before anything is computed for training. Advantages of whole groups stay with the samples.

    ``data`` has groups of rollouts, of a sample or a list of samples each, and is changed in place. A group that keeps
    no rollout is left out. ValueError: a bad option; an unfit option of the trainer; a rollout with two rewards.
    """
    selection, estimator, size = selection_of(args), args.advantage_estimator, args.global_batch_size
    start, end = selection.options.rollouts_start, selection.options.rollouts_end
    require(start == end, "d3s_rollouts_end", end, f"d3s_rollouts_start, which is {start}: steps have a fixed size")
    require(estimator in NORMALISED, "advantage_estimator", estimator, f"one of {NORMALISED}")
    require(args.rewards_normalization, "disable_rewards_normalization", True, "False: advantages are normalised")
    require(not args.log_passrate, "log_passrate", True, "False, because pass rates need all rollouts of a group")
    rewards = torch.full((len(data), max(map(len, data), default=0)), torch.nan)  # NaN: where a group has fewer
    samples = [[each if isinstance(each, list) else [each] for each in group] for group in data]
    for row, group in zip(rewards, samples, strict=True):
        for place, rollout in enumerate(group):
            given = [sample.get_reward_value(args) for sample in rollout]
            require(len(set(given)) == 1, "reward", given, "one for all samples of a rollout")
            row[place] = given[0]
    scale = "group" if args.grpo_std_normalization and estimator != NORMALISED[-1] else "none"
    advantages = d3s.group_advantages(rewards, scale=scale, eps=1e-6).masked_fill(rewards.isnan(), torch.nan)
    kept = selection.rollouts(advantages, 0.0, rewards=rewards, group_size=args.n_samples_per_prompt)
    # Both trainers silently drop samples that do not fill a step. miles can also make a smaller step of them.
    fits = (number := int(kept.sum())) % size == 0 or getattr(args, "use_dynamic_global_batch_size", False)
    require(fits, "global_batch_size", size, f"a divisor of {number}, the rollouts kept, and no num_steps_per_rollout")
    weights = selection.advantages(advantages, kept, scale=scale)
    for group, values in zip(samples, weights.tolist(), strict=True):
        for rollout, value in zip(group, values, strict=False):
            for sample in rollout:  # a new dictionary, since samples may share theirs
                sample.metadata = {**sample.metadata, "d3s_advantage": value}
    data[:] = filter(None, [list(compress(group, marks)) for group, marks in zip(data, kept.tolist(), strict=True)])


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """The raw rewards, and the advantages of whole groups. The trainer would take them from the kept rollouts alone."""
    if not all("d3s_advantage" in sample.metadata for sample in samples):
        path, ours = args.rollout_sample_filter_path, "d3s_slime.keep_rollouts"
        require(path == ours, "rollout_sample_filter_path", path, ours)
        require(False, "rollout_function_path", args.rollout_function_path, "one that calls the sample filter")
    return [s.get_reward_value(args) for s in samples], [s.metadata["d3s_advantage"] for s in samples]


def choose_tokens(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """slime: the advantage 0 for tokens that are not chosen, and ``rollout/d3s/token_share`` as a metric. The pool
    is the tokens of all data-parallel ranks until the next rollouts. ValueError: an option that does not fit."""
    mpu = import_module("megatron.core.parallel_state")
    if not mpu.is_pipeline_last_stage():
        return  # the other stages have no loss
    selection = selection_of_tokens(args, rollout_data, mpu, parts=True)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    require(args.use_rollout_entropy, "use_rollout_entropy", False, "True")
    passed = "'custom_loss', so that slime has a pass before the update, which use_rollout_logprobs also leaves out"
    require("entropy" in rollout_data, "loss_type", args.loss_type, passed)
    entropy, done = torch.cat(rollout_data["entropy"]), d3s.progress_of(rollout_id, args.num_rollout)
    data = {**rollout_data, "response_lengths": [len(values) for values in rollout_data["entropy"]]}
    if mpu.get_context_parallel_world_size() > 1:  # then only the masks still have whole responses
        part = import_module(f"{SLIME}.cp_utils").slice_log_prob_with_cp
        each = zip(*(data[name] for name in ("loss_masks", "total_lengths")), strict=True)
        data["loss_masks"] = [part(mask, total, len(mask)) for mask, total in each]
    rollout_data["advantages"], kept = chosen(selection, data, entropy, done, group)
    numbers = torch.stack([kept.sum(), torch.cat(data["loss_masks"]).sum()])
    dist.all_reduce(numbers, group=group)
    rollout_data["d3s/token_share"] = numbers[0] / numbers[1].clamp(min=1)


def selection_of_tokens(args: Any, data: dict[str, Any], mpu: Any, parts: bool = False) -> d3s.Selection:
    """As :func:`selection_of`. ValueError, too: an option or a layout with which tokens cannot be chosen. With
    ``parts``, a rank may have only parts of responses, if each token is chosen without the others of its response."""
    selection = selection_of(args)
    given, context = selection.options, mpu.get_context_parallel_world_size()
    drawn, ranks = given.token_rule == "random" or selection.cuts, mpu.get_tensor_model_parallel_group().size()
    require(args.advantage_estimator != "gspo", "advantage_estimator", "gspo", "one with a ratio for each token")
    parts = parts and given.token_scope == "batch" and not selection.cuts and given.off_policy_rule in BY_TOKEN
    require(context == 1 or parts, "context_parallel_size", context, "1, because a rank has parts of responses")
    require(ranks == 1 or not drawn, "d3s_token_rule", given.token_rule, "another with tensor parallelism")
    require(given.loss_denominator == "all", "d3s_loss_denominator", "kept", "'all', which the trainer divides by")
    rule, corrected = given.off_policy_rule, any(vars(args).get(name) for name in ("use_tis", "use_rollout_logprobs"))
    # Both trainers give None for what was not computed.
    known = rule == "none" or (data.get("log_probs") and data.get("rollout_log_probs") and not corrected)
    require(known, "d3s_off_policy_rule", rule, "'none' with use_tis or use_rollout_logprobs, or without log_probs")
    return selection


def chosen(selection: d3s.Selection, data: Any, entropy: Tensor, at: float, group: Any) -> tuple[list[Tensor], Tensor]:
    """The advantages with the weights of the chosen tokens, 0 for the others; and which tokens are chosen."""
    off_policy, lengths = selection.options.off_policy_rule != "none", data["response_lengths"]
    mask, advantages = torch.cat(data["loss_masks"]), torch.cat(data["advantages"])
    pool = {"offsets": torch.tensor([0, *lengths], device=entropy.device).cumsum(0), "process_group": group}
    scores = (torch.cat(data[name]) if off_policy else None for name in ("log_probs", "rollout_log_probs"))
    trusted = selection.trusted(*scores, advantages, mask=mask, **pool)
    tokens = selection.tokens(entropy, advantages, at, mask=trusted, **pool)
    weight = trusted.weight * (tokens.mask if tokens.weight is None else tokens.weight)
    return list((advantages * weight).split(lengths)), tokens.mask
