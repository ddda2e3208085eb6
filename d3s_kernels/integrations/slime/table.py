"""What the hooks assume about slime, and about miles, which began as a copy of it."""

from __future__ import annotations

from .._assumptions import Assumption, Table
from .._megatron import MEGATRON

_ROLLOUTS = "keep_rollouts post_process_rewards"
_ALL = f"{_ROLLOUTS} has_spread token_loss start_step"
_LOSS = "(args, batch, logits, sum_of_sample_mean)"


def _in_both(
    package: str, rewards: str, rewards_call: str, estimators: str, loss: str, policy_loss: str
) -> tuple[Assumption, ...]:
    """The lines that both trainers share.

    Args:
        rewards, rewards_call: the function that calls the reward hook, and the call.
        estimators: where rewards are normalised.
        loss, policy_loss: the function that calls the loss hook, and the loss that our hook calls.
    """
    generate = f"{package}.rollout.sglang_rollout:generate_rollout_async"
    sample, options = f"{package}.utils.types:Sample", f"{package}.utils.arguments"
    filtered = "call_dynamic_filter(dynamic_filter, args, group)"
    before_step = "custom_before_train_step_hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)"
    return (
        Assumption(_ALL, options, "calls", "setattr(args, k, v)", "our options, from the file of --custom-config-path"),
        Assumption("keep_rollouts", generate, "calls", "filter_func(args, data)", "the call of the hook"),
        Assumption("post_process_rewards", rewards, "calls", rewards_call, "the call of the hook"),
        Assumption("has_spread", generate, "calls", filtered, "the call of the hook"),
        Assumption("token_loss", loss, "calls", f"func{_LOSS}", "the call of the hook"),
        Assumption("start_step", f"{package}.backends.megatron_utils.model", "calls", before_step, "the hook's call"),
        Assumption(f"{_ROLLOUTS} has_spread", f"{sample}.get_reward_value", "takes", "(self, args)", "rewards"),
        Assumption(_ROLLOUTS, sample, "defines", "metadata index", "where an advantage stays with its sample"),
        Assumption(
            "keep_rollouts", estimators, "reads", "advantage_estimator rewards_normalization grpo_std_normalization",
            "how the trainer would normalise rewards",
        ),
        Assumption(
            "keep_rollouts", options, "reads", "--n-samples-per-prompt --global-batch-size --log-passrate",
            "what the number of kept rollouts has to fit to",
        ),
        Assumption(
            "has_spread", f"{package}.rollout.filter_hub.base_types:DynamicFilterOutput", "defines", "keep reason",
            "what the hook returns",
        ),
        Assumption("token_loss", policy_loss, "takes", _LOSS, "the trainer's loss, which our hook calls"),
        Assumption(
            "token_loss", policy_loss, "reads", "advantages response_lengths total_lengths loss_masks",
            "fields of a micro-batch",
        ),
        Assumption("token_loss", options, "reads", "--rollout-temperature", "the temperature of the entropies"),
        Assumption("start_step", options, "reads", "--num-rollout", "the share of training that is done"),
    )  # fmt: skip


SLIME = Table(
    "slime", "THUDM/slime", "624b824", "2026-08-21",
    (
        *_in_both(
            "slime",
            "slime.ray.rollout:RolloutManager._post_process_rewards",
            "self.custom_reward_post_process_func(self.args, samples)",
            "slime.ray.rollout:RolloutManager._post_process_rewards",
            "slime.backends.megatron_utils.loss:loss_function",
            "slime.backends.megatron_utils.loss:policy_loss_function",
        ),
        MEGATRON._replace(needed_by="token_loss"),
    ),
)  # fmt: skip

MILES = Table(
    "miles", "radixark/miles", "31f1ca9", "2026-08-21",
    (
        *_in_both(
            "miles",
            "miles.ray.rollout.train_data_conversion:_post_process_rewards",
            "f(args, samples)",
            "miles.ray.rollout.train_data_conversion",
            "miles.backends.training_utils.loss:loss_function or "
            "miles.backends.training_utils.loss.objective:loss_function",
            "miles.backends.training_utils.loss_hub.losses:policy_loss_function or "
            "miles.backends.training_utils.loss.hub.losses:policy_loss_function",
        ),
        Assumption(
            "keep_rollouts", "miles.rollout.inference_rollout.inference_rollout_train", "calls", "f(args, data)",
            "the call of the hook in its newer rollouts",
        ),
        Assumption(
            "token_loss", "miles.backends.training_utils.parallel:ParallelState", "defines", "cp tp intra_dp",
            "the groups of ranks",
        ),
        Assumption(
            "token_loss", "miles.backends.training_utils.parallel:get_parallel_state", "takes", "()",
            "the groups of ranks",
        ),
        Assumption(
            "token_loss", "miles.utils.ft_utils.process_group_utils:GroupInfo", "defines", "rank size group",
            "the groups of ranks",
        ),
        Assumption("token_loss", "miles.utils.arguments", "reads", "--qkv-format", "the layout of the logits"),
    ),
)  # fmt: skip
