"""Rollouts that are cut at random: decides when to cut them, and shortens verl's rows. Does not import verl."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import OmegaConf
from torch import Tensor

from .options import POLICY_LOSS, D3SOptions

# In these losses, a token's loss depends on this token alone.
_OF_TOKENS = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "dro", "cispo")
# These losses read whole sequences or micro-batches, but multiply each token's loss by ``rollout_is_weights``.
_OF_ROWS = ("gspo", "espo", "clip_cov", "kl_cov")
_MEAN_OF_ROWS, _OF_WIDTH = "seq-mean-token-mean", "seq-mean-token-sum-norm"
WEIGHT = "d3s_weight"
"""The name of a row's field. The field has, for each token, the factor for the KL loss and the entropy bonus."""
WEIGHED = "actor/d3s_weighed"
"""The name of a worker's metric, which says that the worker has used :data:`WEIGHT`."""

# The fields of a row that have an entry for each token of the response, or of prompt and response.
_OF_RESPONSE = (
    "responses", "response_mask", "loss_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob",
    "entropy", "advantages", "returns", "token_level_rewards", "rollout_is_weights",
    WEIGHT,
)  # fmt: skip
_OF_SEQUENCE = ("input_ids", "position_ids", "attention_mask", "routed_experts")
_SUMMED = ("loss_mask", "rm_scores", "token_level_rewards")  # verl reads the sums of these
_OTHERS = ("prompts", "multi_modal_inputs", "extra_fields")
FIELDS = (*_OF_RESPONSE, *_OF_SEQUENCE, *_OTHERS)


class Plan(NamedTuple):
    """What verl's configuration allows to do with rollouts that are cut at random."""

    shortens: bool
    """Whether the tokens after a cut are removed from the rows. Otherwise verl reads whole rows, and these tokens have
    weight 0.
    """
    before_passes: bool
    """Whether rollouts are cut before the old log-probabilities are computed. Otherwise they are cut afterwards."""
    mean_of_rows: bool
    """Whether the policy loss divides by the number of tokens of each row."""
    weighs_others: bool
    """Whether the KL loss and the entropy bonus need weights of their own: there is at least one of them, and rows are
    shortened.
    """
    mean_of_rows_of_others: bool
    """Whether the KL loss and the entropy bonus divide by the number of tokens of each row."""


def plan_of(config: Any, options: D3SOptions) -> Plan:
    """Returns the plan for verl's whole configuration. Rows are shortened if no token's loss depends on other tokens of
    its row.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    others = bool(actor.use_kl_loss or actor.entropy_coeff)
    modes = _MEAN_OF_ROWS if loss == "sapo" else actor.loss_agg_mode, actor.loss_agg_mode
    by_width = _OF_WIDTH in modes[: 1 + others] and actor.get("loss_scale_factor") is None  # a micro-batch's width
    shortens = loss in _OF_TOKENS and not by_width
    rejects = options.off_policy_rule != "none" or (algorithm.get("rollout_correction") or {}).get("rollout_rs")
    # Other estimators may read more of a rollout than the sum of its scores.
    reads_sums = algorithm.adv_estimator in ("grpo", "grpo_vectorized") and not algorithm.use_kl_in_reward
    means = (mode == _MEAN_OF_ROWS for mode in modes)
    return Plan(shortens, shortens and reads_sums and not rejects, next(means), shortens and others, next(means))


def refusals(config: Any, rule: str) -> list[tuple[Any, str, Any, str]]:
    """Returns the settings that cannot be combined with cuts. Each entry has four parts: whether the configuration has
    the setting, its key, its value, and the accepted values.
    """
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    weighs_by = (config.algorithm.get("rollout_correction") or {}).get("rollout_is")
    beside = f"with token_rule={rule}"
    known, only_tokens = (*_OF_TOKENS, *_OF_ROWS), f"False {beside}, whose weights are for the policy loss alone"
    others = ("actor_rollout_ref.model.mtp.enable_train", "distillation.enabled")
    return [
        (loss not in known, f"{POLICY_LOSS}.loss_mode", loss, f"{' or '.join(map(repr, known))} {beside}"),
        (
            weighs_by, "algorithm.rollout_correction.rollout_is", weighs_by,
            f"null {beside}, which writes rollout_is_weights itself",
        ),
        *((OmegaConf.select(config, key), key, True, only_tokens) for key in others),
    ]  # fmt: skip


def shortened(row: dict[str, Any], length: int, set_field: str | None) -> dict[str, Any]:
    """Returns the fields of a row that change if only the first ``length`` tokens of the response remain. Returns no
    field if nothing would change, or if the row has images, whose number must match the tokens.

    verl sums the scores and ``loss_mask`` over a row, and divides the loss of a mini-batch by the sum of ``loss_mask``.
    So that these sums do not change, the values of the removed tokens are added to the last token that remains.

    Example:
        >>> import torch
        >>> from d3s_kernels.integrations.verl.cuts import shortened
        >>> row = {"prompts": torch.tensor([7, 8]), "responses": torch.tensor([1, 2, 3]), "loss_mask": torch.ones(3)}
        >>> shortened(row, 2, None)
        {'responses': tensor([1, 2]), 'loss_mask': tensor([1., 2.])}
    """
    if length >= len(row["responses"]) or row.get("multi_modal_inputs"):
        return {}
    changed: dict[str, Any] = {name: row[name][:length].clone() for name in _OF_RESPONSE if name in row}
    for name in _SUMMED:
        if name in changed:
            changed[name][-1] += row[name][length:].sum()
    end = len(row["prompts"]) + length
    for name in _OF_SEQUENCE:
        if isinstance(row.get(name), Tensor):
            whole = row[name]  # position ids of several dimensions have the tokens last
            changed[name] = whole[..., :end].clone() if name == "position_ids" else whole[:end].clone()
    if set_field is not None and "extra_fields" in row:
        sets = row["extra_fields"].get(set_field)
        if sets is not None and len(sets) == len(row["responses"]):  # a wrong number of sets is refused later
            sets = sets[:length]
        changed["extra_fields"] = row["extra_fields"] | {set_field: sets}
    return changed
