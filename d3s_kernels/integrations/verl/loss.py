"""Policy losses for verl: ``espo`` and ``d3s``. ``d3s`` computes another policy loss, but lets gradient flow only
through some tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig

from ...off_policy.importance_ratio import espo_terms
from ...selection.options import check_options, check_token_rule, option_names, options_from, require_mode
from ...tokens.select_tokens import select_tokens
from . import entropy  # imports no names: this loads verl, which may import this file before the names exist
from .options import POLICY_LOSS, PolicyLossOptions


@dataclass
class D3SPolicyLossConfig(PolicyLossOptions, PolicyLossConfig):  # type: ignore[misc]  # verl has no types
    """The section ``actor_rollout_ref.actor.policy_loss`` with the options of ``d3s`` and ``espo``. verl's own class
    refuses unknown keys; ``policy_loss._target_`` selects this class instead.

    Raises:
        ValueError: a bad value; the message names the option, the value and the accepted values.
    """

    loss_mode: str = "d3s"

    def __post_init__(self) -> None:
        check_options(self, f"{POLICY_LOSS}.")
        check_token_rule(self, f"{POLICY_LOSS}.")
        if self.loss_mode != "d3s":
            of_d3s = "base_loss", "token_ratio", "token_rule", "token_scope", "drop_zeros"
            require_mode(self, "loss_mode 'd3s'", of_d3s, f"{POLICY_LOSS}.")
        if "espo" not in (self.loss_mode, self.base_loss):
            of_espo = "quantiles", "alpha", "denominator", "vocab_size", "entropy_source"
            require_mode(self, "loss_mode 'espo'", of_espo, f"{POLICY_LOSS}.")


@register_policy_loss("d3s")  # type: ignore[untyped-decorator]
def d3s_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Computes ``base_loss`` on all tokens of a micro-batch. Gradient flows only through a share ``token_ratio`` of
    these tokens: the tokens with the largest scores.

    verl does not pass entropies to a policy loss, so by default a token's score is ``|advantage| * surprisal``. The
    surprisal ``-old_log_prob`` is an unbiased estimate of the old policy's entropy, but comes from only one sampled
    token. So a choice by the surprisal is noisier than a choice by the entropy. The number of chosen tokens is exact,
    as in :func:`d3s_kernels.select_tokens`. The base loss's ratios, clipping metrics and denominators still include
    every token. The log-probabilities of tokens that are not chosen are constants.

    Args:
        old_log_prob, log_prob, advantages: float ``[B, T]``.
        response_mask: bool or int ``[B, T]``.
        loss_agg_mode, config, rollout_is_weights: passed on to the base loss. ``config.policy_loss`` has the options
            ``base_loss`` ("vanilla"), ``token_ratio`` (0.20), ``token_rule`` ("advantage_entropy"; every rule uses the
            surprisal as the entropy), ``token_scope`` ("batch", which is the micro-batch here, or "sequence") and
            ``drop_zeros`` (False).

    Returns:
        The results of the base loss.

    Raises:
        ValueError: no config, a bad option, or a base loss that verl does not know.
    """
    options = _options(config)
    kept = select_tokens(
        -old_log_prob.detach(), advantages.detach(), options.token_ratio, rule=options.token_rule,
        mask=response_mask.bool(), scope=options.token_scope, drop_zeros=options.drop_zeros,
    ).mask  # fmt: skip
    result: tuple[Tensor, dict[str, Any]] = get_policy_loss_fn(options.base_loss)(
        old_log_prob=old_log_prob, log_prob=torch.where(kept, log_prob, log_prob.detach()), advantages=advantages,
        response_mask=response_mask, loss_agg_mode=loss_agg_mode, config=config, rollout_is_weights=rollout_is_weights,
    )  # fmt: skip
    return result


@register_policy_loss("espo")  # type: ignore[untyped-decorator]
def espo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Computes ESPO's loss: the negative of ESPO's objective (arXiv 2512.00499, eq. 5). A token's term in the objective
    is ``min(s A, clip(s, 1 - epsilon, 1 + epsilon) A)``. The terms are averaged over the tokens of each group, then
    over the groups of each sequence, then over the sequences.

    The groups come from :func:`d3s_kernels.entropy_groups`, the ratio ``s`` from :func:`d3s_kernels.importance_ratio`,
    and ``epsilon`` from :func:`d3s_kernels.adaptive_clip`. The loss gives each token a weight. With these weights, a
    sequence's mean over tokens equals its mean over groups, so verl's aggregation "seq-mean-token-mean" can average
    over micro-batches and ranks. verl's option ``clip_ratio`` is not used.

    Args:
        old_log_prob, log_prob, advantages: float ``[B, T]``.
        response_mask: bool or int ``[B, T]``.
        loss_agg_mode: not used, since eq. 5 itself says how to average.
        config: the actor's configuration. ``config.policy_loss`` has the options ``quantiles`` ([0.8]), ``alpha``
            (0.02), ``denominator`` ("self"), ``vocab_size`` (the model's) and ``entropy_source`` ("old").
        rollout_is_weights: float ``[B, T]``, multiplied with the tokens' losses, as in verl's own losses.

    Returns:
        The loss and the metrics: the share of clipped tokens, verl's estimate of the divergence from the old policy,
        and the mean epsilon over tokens.

    Raises:
        ValueError: no config, a bad option, an unknown vocabulary size, or no entropy from ``entropy_source``.
    """
    options = _options(config)
    vocab_size = options.vocab_size
    if vocab_size is None:
        model = getattr(config.get("model_config"), "hf_config", None)
        if model is None:
            raise ValueError(
                f"{POLICY_LOSS}.vocab_size: got None, and no model to ask; takes a whole number of at least 2"
            )
        vocab_size = model.get_text_config().vocab_size
    ratio, epsilon, weight = espo_terms(
        log_prob, old_log_prob, entropy.token_entropy(options.entropy_source, old_log_prob), response_mask.bool(),
        quantiles=options.quantiles, alpha=options.alpha, denominator=options.denominator, vocab_size=vocab_size,
    )  # fmt: skip

    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
    losses = weight * torch.maximum(plain, clipped)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss: Tensor = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode="seq-mean-token-mean", **config.global_batch_info
    )

    means = {
        "actor/pg_clipfrac": (clipped > plain).float(),
        "actor/ppo_kl": (old_log_prob - log_prob).detach(),
        "actor/espo_epsilon": epsilon,
    }
    return loss, {name: masked_mean(values, response_mask).item() for name, values in means.items()}


def _options(config: Any) -> PolicyLossOptions:
    if config is None:
        raise ValueError("config: got None; takes the actor's configuration")
    missing = object()
    section = {name: config.policy_loss.get(name, missing) for name in option_names(PolicyLossOptions)}
    values = {name: value for name, value in section.items() if value is not missing}
    return options_from(PolicyLossOptions, values, f"{POLICY_LOSS}.")
