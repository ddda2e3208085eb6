"""slime and miles: the training gets only the rollouts that D3S keeps, and its loss only their chosen tokens.

Copy this file to a folder that is on the PYTHONPATH of all ranks. Both trainers take the paths of functions, and a file
of options::

    --rollout-sample-filter-path d3s_slime.keep_rollouts
    --custom-reward-post-process-path d3s_slime.post_process_rewards  # always together with the line above
    --loss-type custom_loss --custom-loss-function-path d3s_slime.token_loss  # in miles: d3s_slime.miles_token_loss
    --custom-megatron-before-train-step-hook-path d3s_slime.start_step  # for a share of tokens that changes
    --custom-config-path d3s.yaml  # d3s_rollouts_start: 8, and so on

The signatures were read in slime at 624b824 and in miles at 31f1ca9, 2026-08-21.
"""

from importlib import import_module
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

import d3s_kernels as d3s
from d3s_kernels.distributed import vocab_parallel_logprob_entropy

Result: TypeAlias = tuple[Tensor, dict[str, Tensor]]
NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")  # estimators whose rewards are normalised
progress: float | None = None  # the share of training that is done, set by start_step


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
    seen = all("d3s_advantage" in sample.metadata for sample in samples)
    require(seen, "rollout_sample_filter_path", args.rollout_sample_filter_path, "d3s_slime.keep_rollouts")
    return [s.get_reward_value(args) for s in samples], [s.metadata["d3s_advantage"] for s in samples]


def start_step(args: Any, rollout_id: int, *_: Any) -> None:
    global progress  # tells the loss how much of training is done
    progress = d3s.progress_of(rollout_id, args.num_rollout)


def token_loss(args: Any, batch: dict[str, Any], logits: Tensor, reduce: Any) -> Result:
    """slime's policy loss, with the advantage 0 at tokens that are not chosen, and ``d3s/token_share`` as a metric. The
    pool is the micro-batches of all data-parallel ranks. ValueError: an option that does not fit."""
    return on_chosen_tokens("slime.backends.megatron_utils.loss", args, batch, logits, reduce)


def miles_token_loss(args: Any, batch: dict[str, Any], logits: Tensor, reduce: Any) -> Result:
    return on_chosen_tokens("miles.backends.training_utils.loss_hub.losses", args, batch, logits, reduce)


def on_chosen_tokens(losses: str, args: Any, batch: dict[str, Any], logits: Tensor, reduce: Any) -> Result:
    mpu, selection = import_module("megatron.core.parallel_state"), selection_of(args)
    given, layout, lengths = selection.options, getattr(args, "qkv_format", "thd"), batch["response_lengths"]
    start, end, context = given.token_ratio_start, given.token_ratio_end, mpu.get_context_parallel_world_size()
    vocabulary, first = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
    of_token = "one with a ratio for each token: in a sequence's, dropped tokens would keep a gradient"
    require(args.advantage_estimator != "gspo", "advantage_estimator", "gspo", of_token)
    require(context == 1, "context_parallel_size", context, "1, because a rank has parts of responses")
    require(layout == "thd", "qkv_format", layout, "'thd'")
    alone = given.token_rule != "random" or vocabulary.size() == 1
    require(alone, "d3s_token_rule", "random", "another with tensor parallelism, whose ranks would draw others")
    require(given.loss_denominator == "all", "d3s_loss_denominator", "kept", "'all', which the trainer divides by")
    rule, corrected = given.off_policy_rule, any(vars(args).get(name) for name in ("use_tis", "use_rollout_logprobs"))
    known = rule == "none" or ({"log_probs", "rollout_log_probs"} <= batch.keys() and not corrected)
    require(known, "d3s_off_policy_rule", rule, "'none' with use_tis or use_rollout_logprobs, or without log_probs")
    require(start == end or progress is not None, "d3s_token_ratio_end", end, f"{start}, unless start_step is called")
    of_responses = torch.cat([torch.arange(t) >= t - n for t, n in zip(batch["total_lengths"], lengths, strict=True)])
    # The row before a token predicts it. Rows at the end are padding.
    read = pad(of_responses[1:], (0, logits.shape[1] - len(of_responses) + 1)).to(logits.device)
    no_label = torch.full_like(read, -100, dtype=torch.int64)
    _, entropy = vocab_parallel_logprob_entropy(
        logits[0].detach(), no_label, first, vocabulary, temperature=args.rollout_temperature or 1.0, mask=read
    )
    mask, advantages = torch.cat(batch["loss_masks"]), torch.cat(batch["advantages"])
    offsets = torch.tensor([0, *lengths], device=logits.device).cumsum(0)
    pool = {"offsets": offsets, "process_group": mpu.get_data_parallel_group()}
    log_p, log_q = (torch.cat(batch.get(name, [entropy[read]])) for name in ("log_probs", "rollout_log_probs"))
    trusted = selection.trusted(log_p, log_q, advantages, mask=mask, **pool)
    kept = selection.tokens(entropy[read], advantages, progress or 0.0, mask=trusted, **pool).mask
    changed = {**batch, "advantages": list((advantages * kept * trusted.weight).split(lengths))}
    loss, metrics = import_module(losses).policy_loss_function(args, changed, logits, reduce)
    return loss, {**metrics, "d3s/token_share": reduce(kept.float()).detach()}
