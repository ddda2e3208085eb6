"""Changes of TRL's trainer, as a later version could bring them, and the error that each has to give."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Change(NamedTuple):
    replaced: dict[str, str]  # text of TRL's source, and what stands there instead
    error: str
    options: Mapping[str, Any] = MappingProxyType({})  # of the trainer


_RATIO = "        log_ratio = per_token_logps - old"
_METRICS = "        # Log the metrics\n"
_MEAN = "            loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
_LEADING = "model,\n        {},\n        {},\n        logits_to_keep,\n        batch_size=None"
_REWARDS = "        # Merge extra_fields from"


def _before(place: str, line: str) -> dict[str, str]:
    return {place: f"        {line}\n{place}"}


BY_THE_TEST = {
    "a method is renamed": Change(
        {"_get_per_token_logps_and_entropies": "_score_tokens"},
        r"GRPOTrainer\._get_per_token_logps_and_entropies: is not in TRL",
    ),
    "the loss is renamed": Change({"_compute_loss": "_loss"}, r"GRPOTrainer\._compute_loss: is not in TRL"),
    "parameters change places": Change(
        {_LEADING.format("input_ids", "attention_mask"): _LEADING.format("attention_mask", "input_ids")},
        r"entropies: got GRPOTrainer\..*changed\.py:\d+\) with the parameters \(self, model, attention_mask, input_ids",
    ),
    "a parameter is added": Change(
        {"image_position_ids=None,\n    ) ->": "image_position_ids=None,\n        audio=None,\n    ) ->"},
        r"image_position_ids, audio\); takes \(self, model, input_ids",
    ),
    "an attribute is renamed": Change(
        {"self._entropy_bonus_enabled =": "self._bonus =", "if self._entropy_bonus_enabled": "if self.entropy_coef"},
        r"GRPOTrainer\._entropy_bonus_enabled: a trainer of TRL .* has no such attribute",
    ),
    "a new loss type": Change(
        {'self.loss_type in ["cispo", "dapo"': 'self.loss_type in ["newpo", "cispo", "dapo"'},
        r"loss_type: got 'newpo'; takes 'bnpo' or 'cispo' or",
        {"loss_type": "newpo"},
    ),
    "a new term with a new option": Change(
        _before(_METRICS, "loss = loss + self.args.penalty"),
        r"reads self\.args\.penalty, which is not known: it may bring a term",
    ),
    "a new field for the loss": Change(
        {'advantages = inputs["advantages"]\n': 'advantages = inputs["advantages"] + inputs.get("bonus", 0)\n'},
        r"reads inputs\.bonus, which is not known",
    ),
    "the clip range comes from elsewhere": Change(
        {"self.epsilon_low": "self.args.delta"},
        r"does not read self\.epsilon_low, where this integration hands over ESPO's clip range",
    ),
    "a new term without a new name": Change(
        _before(_METRICS, "loss = loss + 0.1 * per_token_logps.mean()"),
        r"with loss_type 'grpo': got the gradient .* of equal policies; takes",
    ),
    "another denominator": Change(
        {_MEAN: "            loss = (per_token_loss * mask).sum() / mask.sum()"},
        r"with loss_type 'grpo': got the gradient .* of equal policies; takes",
    ),
    "a KL term with another denominator": Change(
        {"self.beta * per_token_kl\n": "self.beta * per_token_kl * mask.sum(-1, keepdim=True)\n"},
        r"with loss_type 'grpo': got the gradient .* of tokens that are alike",
        {"beta": 1e-4},
    ),
    "the loss reads entropies": Change(
        _before(_METRICS, "loss = loss - 0.1 * entropies.mean()"), r"got the gradient .* of entropies; takes"
    ),
    "ratios depend on other tokens": Change(
        _before("        # Compute the KL divergence between the model", "coef_1 = coef_1 / coef_1.mean().detach()"),
        r"got the gradient .* of a token while other tokens change",
    ),
    "tokens are scored twice": Change(
        _before(_RATIO, "self._get_per_token_logps_and_entropies(model, input_ids, None, 1)"),
        r"scored tokens 2 times, 1 of them with entropies",
    ),
    "the loss forwards the model": Change(
        _before(_RATIO, "model(input_ids)"),
        r"the loss forwards the model outside of _get_per_token_logps_and_entropies",
    ),
}

IN_THE_FIRST_STEP = {
    "an expected pass does not come": Change(
        {"if self.args.gradient_accumulation_steps % generate_every != 0 or (": "if False or ("},
        r"no pass came for old_per_token_logps, which the loss needs",
        {"num_iterations": 2},
    ),
    "a pass is read before the rewards": Change(
        _before(_REWARDS, "self._drift = old_per_token_logps.mean()"),
        r"mean reads log-probabilities before the rollouts are chosen",
        {"num_iterations": 2},
    ),
    "a pass fills another field": Change(
        {'output["old_per_token_logps"] = old': 'output["logps"] = old'},
        r"old_per_token_logps: the batch .* does not have there what the pass for it returned",
        {"num_iterations": 2},
    ),
    "the loss asks for scores with another argument": Change(
        {"            compute_entropy=True,": "            1,\n            compute_entropy=True,"},
        r"no token was selected in this step",
    ),
    "a new field in the batch": Change(
        {"        return output\n": '        output["weights"] = completion_mask\n        return output\n'},
        r"its batch has weights, which is not known",
    ),
    "the step has another loss": Change(
        {"return self._compute_loss(model, inputs)": "return model.get_output_embeddings().weight.sum()"},
        r"no token was selected in this step\. The loss needs a gradient through the log-probabilities",
    ),
}


def other_order(source: str) -> dict[str, str]:
    """The reference's pass before that of the old policy."""
    start = source.index("            # Compute the per-token log probabilities for the reference model")
    reference = source[start : source.index(_REWARDS)]
    first = "            # If the generation and optimization steps are misaligned"
    return {reference: "", first: reference + first}
