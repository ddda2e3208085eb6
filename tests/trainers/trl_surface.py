"""What the integration relies on in TRL beyond its public interface, and the comparison with a TRL.

Selection multiplies the gradient of each log-probability by 0, or by a weight that is known for each type of loss. This
is right for a loss that is a sum over tokens, divided by the known denominator. A term with another denominator, or one
that reads entropies, would get a wrong gradient without any error. Here such a term is seen by its gradient.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import re
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from d3s_kernels.integrations.trl.batch import loss_mask
from d3s_kernels.selection.loss_weights import DENOMINATORS

# The parameters, in order, of what is overridden, called or replaced.
PARAMETERS = {
    "grpo_trainer.GRPOTrainer._generate_and_score_completions": "self inputs",
    "grpo_trainer.GRPOTrainer._generate_single_turn": (
        "self prompt_ids images multimodal_fields num_generations has_tool_images"
    ),
    "grpo_trainer.GRPOTrainer._calculate_rewards": "self inputs prompts completions completion_ids_list",
    "grpo_trainer.GRPOTrainer._get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
        "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids"
    ),
    "grpo_trainer.GRPOTrainer._compute_loss": "self model inputs",
    "grpo_trainer.GRPOTrainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "grpo_trainer.GRPOTrainer.training_step": "self model inputs num_items_in_batch",
    "grpo_trainer.GRPOTrainer.get_high_entropy_mask": "self entropies mask threshold",
    "grpo_trainer.GRPOTrainer._prepare_inputs": "self generation_batch",
    "grpo_trainer.GRPOTrainer.log": "self logs start_time",
    "grpo_trainer.disable_gradient_checkpointing": "model gradient_checkpointing_kwargs",
    "grpo_trainer.use_adapter": "model adapter_name",
    "utils.split_pixel_values_by_grid": "batch",
    "utils.unsplit_pixel_values_by_grid": "batch",
    "utils._ChunkedLogProbFunction.forward": (
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
    ),
    "utils._use_triton": "device",
}
# The same for distillation, below trl instead of trl.trainer.
_ASYNC, _SERVER = (f"experimental.{name}.{name}_trainer" for name in ("async_distillation", "server_distillation"))
DISTILLATION = {
    f"{_ASYNC}:AsyncDistillationTrainer._compute_loss": "self unwrapped_model inputs",
    f"{_ASYNC}:_chunked_jsd_loss": (
        "hidden_valid lm_head_weight lm_head_bias logit_scale final_logit_softcapping target_ids teacher_target_logps "
        "valid_candidate_mask beta temperature add_tail_bucket teacher_id_idx num_teachers chunk_size"
    ),
    f"{_ASYNC}:_add_tail_bucket": "log_probs valid_mask",
    f"{_ASYNC}:_jsd_divergence": "student_log_probs teacher_log_probs beta support_mask",
    f"{_SERVER}:ServerDistillationTrainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "trainer.distillation_trainer:DistillationTrainer._get_last_hidden_state": (
        "self unwrapped_model input_ids attention_mask logits_to_keep pixel_values image_grid_thw pixel_attention_mask "
        "spatial_shapes image_sizes token_type_ids mm_token_type_ids image_position_ids"
    ),
    "models.utils:_ForwardRedirection.__call__": "self wrapper_module original_module method args kwargs",
}
HEAD = ("utils._ChunkedLogProbFunction", "utils._use_triton")  # what TRL's fused head looks up, and ours replaces

# All that the loss reads in the versions that were tested. Another name may bring a term that the selection does not
# cover; one that is missing may be where this integration hands over log-probabilities, clip ranges or advantages.
LOSS_READS = (
    "self._get_per_token_logps_and_entropies self.get_high_entropy_mask self.epsilon_low self.epsilon_high "
    "self.accelerator self.aux_loss_enabled self.beta self.current_gradient_accumulation_steps "
    "self._entropy_bonus_enabled self.entropy_coef self._entropy_window_stats self.get_gamma_weights "
    "self.get_off_policy_mask self.importance_sampling_level self._last_world_entropy "
    "self.loss_type self.max_completion_length self._metrics self.model self.off_policy_mask_threshold "
    "self.router_aux_loss_coef self.top_entropy_quantile self.use_adaptive_entropy self.use_vllm "
    "self.vllm_importance_sampling_correction "
    "self.args.delta self.args.entropy_coef_delta self.args.entropy_coef_max self.args.entropy_coef_min "
    "self.args.entropy_target self.args.sapo_temperature_neg self.args.sapo_temperature_pos "
    "self.args.steps_per_generation self.args.use_bias_correction_kl self.args.vespo_k_neg self.args.vespo_k_pos "
    "self.args.vespo_lambda_neg self.args.vespo_lambda_pos "
    "inputs.advantages inputs.completion_mask inputs.tool_mask inputs.num_items_in_batch inputs.old_per_token_logps "
    "inputs.ref_per_token_logps inputs.sampling_per_token_logps inputs.importance_sampling_ratio "
    "inputs.completion_ids inputs.image_grid_thw inputs.image_position_ids inputs.image_sizes "
    "inputs.mm_token_type_ids inputs.num_images inputs.num_tiles inputs.pixel_attention_mask inputs.pixel_values "
    "inputs.prompt_ids inputs.prompt_mask inputs.spatial_shapes inputs.token_type_ids"
)


def read_by(loss: Any) -> set[str]:
    """``self.<name>``, ``self.args.<name>`` and ``inputs.<field>``, as far as the function's source has them."""
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(loss))))  # without comments
    found = set(re.findall(r"\bself\.(?:args\.)?\w+", source))
    found |= {f"self.{name}" for name in re.findall(r"getattr\(self, '(\w+)'", source)}
    fields = re.findall(r"\binputs(?:\[|\.get\()'(\w+)'", source) + re.findall(r"'(\w+)' (?:not )?in inputs\b", source)
    return found | {f"inputs.{name}" for name in fields}


# ---- the loss --------------------------------------------------------------------------------------------------------

_APART = 0.05  # a log-ratio that no loss clips here


def check_loss(trainer: Any, loss: Any) -> None:
    """Evaluates TRL's ``_compute_loss`` three times on two short rows. The trainer is not changed."""
    probe = _Probe(trainer, loss)
    mask, divided_by = probe.mask, probe.denominator()

    same, of_entropy = probe.gradients([1.0, -0.5], torch.zeros(mask.shape))
    expected = torch.where(mask, torch.tensor([[-1.0], [0.5]]) / divided_by, 0.0)
    probe.require("of equal policies", same, expected)
    bonus = of_entropy[mask].mean() if trainer._entropy_bonus_enabled else torch.zeros(())
    probe.require("of entropies", of_entropy, torch.where(mask, bonus, 0.0))

    # Tokens that are all alike have the same gradient, but for the denominator, also in a KL term.
    apart = torch.full(mask.shape, 0.0 if trainer.loss_type == "vespo" else _APART)  # vespo takes sums of sequences
    alike, _ = probe.gradients([1.0, 1.0], apart, to_reference=_APART)
    probe.require("of tokens that are alike", alike, torch.where(mask, alike[0, 0] * divided_by[0] / divided_by, 0.0))

    if trainer._tokens_are_independent({}):  # then dropped tokens are not even scored
        kept = torch.arange(mask.shape[1]) < 1
        moved, _ = probe.gradients([1.0, 1.0], torch.where(kept, apart, -2 * apart), to_reference=_APART)
        probe.require("of a token while other tokens change", moved[:, kept], alike[:, kept])


class _Probe:
    """A copy of a trainer whose scores are made up."""

    def __init__(self, trainer: Any, loss: Any) -> None:
        self.loss, self.trainer = loss, copy.copy(trainer)
        made = self.trainer
        made.model = SimpleNamespace(training=True)  # no other method may forward it
        made._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        made.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        made.args = copy.copy(trainer.args)
        # Nothing is clipped or masked away.
        made.args.delta, made.top_entropy_quantile = None, 1.0
        made.epsilon_low, made.epsilon_high = 0.5, 5.0
        if trainer.off_policy_mask_threshold is not None:
            made.off_policy_mask_threshold = math.inf
        made.beta = float(trainer.beta != 0)  # however small, a KL term is seen
        # Two rows with 3 and 2 tokens of the loss, beside one of a tool and padding.
        ones = torch.ones(2, 5, dtype=torch.long)
        mask, tools = ones.clone(), ones.clone()
        mask[0, 4], mask[1, 2:], tools[0, 1] = 0, 0, 0
        self.batch = {
            "prompt_ids": ones[:, :1], "prompt_mask": ones[:, :1], "completion_ids": ones, "completion_mask": mask,
            "tool_mask": tools, "num_items_in_batch": (mask * tools).sum(),
            "importance_sampling_ratio": ones[:, :1].float(),
        }  # fmt: skip
        self.mask = loss_mask(self.batch).bool()

    def gradients(self, advantages: list[float], log_ratio: Tensor, to_reference: float = 0.0) -> tuple[Tensor, Tensor]:
        """The gradients of log-probabilities and of entropies, ``[2, 5]``, at these log-ratios to the old policy."""
        logprob, entropy = (torch.full((2, 5), value, requires_grad=True) for value in (-1.0, 0.5))
        calls: list[bool] = []

        def score(*_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(compute_entropy)
            return logprob, entropy, torch.zeros(())

        self.trainer._get_per_token_logps_and_entropies = score
        old, reference = logprob.detach() - log_ratio, logprob.detach() - to_reference
        batch = self.batch | {"advantages": torch.tensor(advantages), "old_per_token_logps": old}
        batch |= {"sampling_per_token_logps": old, "ref_per_token_logps": reference}
        value = self.loss(self.trainer, self.trainer.model, batch)
        found = torch.autograd.grad(value, (logprob, entropy), allow_unused=True, materialize_grads=True)
        assert calls == [True], "the loss does not score tokens once, with entropies"
        return found

    def denominator(self) -> Tensor:
        """``[2, 1]``: what the loss divides each row's tokens by."""
        made, mask = self.trainer, self.mask
        lengths, steps = mask.sum(dim=1, keepdim=True), made.args.gradient_accumulation_steps
        found: dict[str, Tensor] = {
            "sequence": 2 * lengths * steps,
            "sequences": torch.full_like(lengths, 2 * steps),
            "process": lengths.sum().expand(2, 1) * steps,
            "constant": torch.full_like(lengths, 2 * made.max_completion_length * steps),
            "generation": lengths.sum().expand(2, 1) * steps / made.args.steps_per_generation,
        }
        return found[DENOMINATORS[made.loss_type]]

    def require(self, what: str, found: Tensor, expected: Tensor) -> None:
        assert torch.allclose(found, expected, rtol=1e-5), (
            f"loss_type {self.trainer.loss_type!r} has the gradient {found} {what}, not {expected}: the selection of "
            "tokens does not cover such a loss"
        )
