"""What this integration relies on in TRL beyond its public interface, in one table."""

from __future__ import annotations

from typing import NamedTuple


class UnknownTRL(RuntimeError):
    """TRL, or a class that overrides its methods, does something that the selection does not cover."""


class Relied(NamedTuple):
    """A method or function with its parameters in order, without defaults, and why it is relied on."""

    name: str
    parameters: str
    why: str
    since: str = "1.15"


# Methods of GRPOTrainer.
METHODS = (
    Relied("_generate_and_score_completions", "self inputs", "overridden: rollouts are kept from its batch"),
    Relied(
        "_generate_single_turn", "self prompt_ids images multimodal_fields num_generations has_tool_images",
        "overridden: records what tokens are drawn from",
    ),
    Relied(
        "_calculate_rewards", "self inputs prompts completions completion_ids_list",
        "overridden: the page of a batch shows the rewards",
    ),
    Relied(
        "_get_per_token_logps_and_entropies",
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
        "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids",
        "overridden: the only pass that scores tokens; its log-probabilities get the hooks",
    ),
    Relied("_compute_loss", "self model inputs", "overridden: every token that it scores is one of the loss"),
    Relied(
        "compute_loss", "self model inputs return_outputs num_items_in_batch", "calls _compute_loss in each step",
    ),
    Relied(
        "training_step", "self model inputs num_items_in_batch", "overridden: one step, with its backward",
    ),
    Relied(
        "get_high_entropy_mask", "self entropies mask threshold",
        "overridden: in training the choice of tokens stands for TRL's",
    ),
    Relied("_prepare_inputs", "self generation_batch", "splits the kept rows evenly over the steps of a generation"),
    Relied("log", "self logs start_time", "overridden: our metrics become numbers"),
)  # fmt: skip

# Functions of TRL's modules.
FUNCTIONS = (
    Relied(
        "trl.trainer.grpo_trainer.disable_gradient_checkpointing", "model gradient_checkpointing_kwargs",
        "passes without gradient need no checkpoints",
    ),
    Relied("trl.trainer.grpo_trainer.use_adapter", "model adapter_name", "the reference of a policy with adapters"),
    Relied("trl.trainer.utils.split_pixel_values_by_grid", "batch", "images by rollout, so that rows can be taken"),
    Relied("trl.trainer.utils.unsplit_pixel_values_by_grid", "batch", "the way back"),
)  # fmt: skip

# What TRL's fused head of a model looks up in trl.trainer.utils, and where head.py replaces it.
HEAD = (
    Relied(
        "trl.trainer.utils._ChunkedLogProbFunction.forward",
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs",
        "replaced by our head",
    ),
    Relied("trl.trainer.utils._use_triton", "device", "replaced, so that only labelled positions are scored", "1.16"),
)

# Attributes of a trainer that was made.
ATTRIBUTES = {
    "_metrics": "TRL logs what is appended to it",
    "_tokenizer": "the token of padding",
    "accelerator": "processes and devices",
    "aux_loss_enabled": "the loss of a router depends on all tokens",
    "_entropy_bonus_enabled": "the entropy bonus depends on all tokens",
    "beta": "whether there is a pass of a reference",
    "epsilon_high": "replaced while ESPO's loss is computed",
    "epsilon_low": "replaced while ESPO's loss is computed",
    "importance_sampling_level": "whether tokens depend on each other",
    "loss_type": "what the loss divides by",
    "max_completion_length": "what dr_grpo divides by",
    "multi_objective_aggregation": "which rewards make a group of equal ones",
    "num_generations": "rows of a group",
    "num_iterations": "whether there is a pass of the old policy",
    "off_policy_mask_threshold": "whether tokens depend on each other",
    "pad_to_multiple_of": "the widths that TRL pads to",
    "ref_model": "the model of the reference's pass",
    "reward_weights": "the page of a batch shows the rewards",
    "scale_rewards": "how advantages are normalised again",
    "use_vllm": "whether there is a pass of the old policy",
    "vllm_importance_sampling_correction": "whether it is needed before the rewards",
}

# What the loss has to read, because this integration hands it over there.
LOSS_READS = {
    "self._get_per_token_logps_and_entropies": "the log-probabilities with hooks",
    "self.get_high_entropy_mask": "all tokens, since others are chosen",
    "self.epsilon_low": "ESPO's clip range",
    "self.epsilon_high": "ESPO's clip range",
    "inputs.advantages": "ESPO's weights; advantages of the kept rollouts",
    "inputs.completion_mask": "the tokens of the loss",
    "inputs.tool_mask": "the tokens of the loss",
    "inputs.num_items_in_batch": "counted again after rollouts were dropped",
    "inputs.old_per_token_logps": "scored after rollouts were dropped; ESPO's ratios",
    "inputs.ref_per_token_logps": "scored after rollouts were dropped",
    "inputs.sampling_per_token_logps": "what ESPO leaves to the mask of off-policy sequences",
}

# What else it reads in the versions that were tested. Another name may bring a term that the selection does not cover.
LOSS_MAY_READ = (
    "self.accelerator self.args self.aux_loss_enabled self.beta self.current_gradient_accumulation_steps "
    "self._entropy_bonus_enabled self.entropy_coef self._entropy_window_stats self.get_gamma_weights "
    "self.get_off_policy_mask self.importance_sampling_level self._last_world_entropy "
    "self.loss_type self.max_completion_length self._metrics self.model self.off_policy_mask_threshold "
    "self.router_aux_loss_coef self.top_entropy_quantile self.use_adaptive_entropy self.use_vllm "
    "self.vllm_importance_sampling_correction "
    "self.args.delta self.args.entropy_coef_delta self.args.entropy_coef_max self.args.entropy_coef_min "
    "self.args.entropy_target self.args.sapo_temperature_neg self.args.sapo_temperature_pos "
    "self.args.steps_per_generation self.args.use_bias_correction_kl self.args.vespo_k_neg self.args.vespo_k_pos "
    "self.args.vespo_lambda_neg self.args.vespo_lambda_pos "
    "inputs.completion_ids inputs.image_grid_thw inputs.image_position_ids inputs.image_sizes "
    "inputs.importance_sampling_ratio inputs.mm_token_type_ids inputs.num_images inputs.num_tiles "
    "inputs.pixel_attention_mask inputs.pixel_values inputs.prompt_ids inputs.prompt_mask inputs.spatial_shapes "
    "inputs.token_type_ids"
)
