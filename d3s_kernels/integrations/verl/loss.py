"""The policy loss ``d3s`` for verl: wraps another policy loss and lets gradient flow only through the top tokens."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

from ...selection_options import FLAG, RATIO, Takes, TokenScope, check_options, check_token_rule, one_of, option
from ...tokens import TokenRule, select_tokens
from .options import POLICY_LOSS, EspoOptions, of_policy_loss

_BASE = Takes(lambda value: isinstance(value, str) and value != "d3s", "the name of another policy loss")


@dataclass
class D3SLossOptions:
    """The options of the policy loss ``d3s``. Its pool is verl's micro-batch, and a share does not change."""

    base_loss: str = option("vanilla", "the policy loss of all tokens", _BASE)
    token_ratio: float = option(0.20, "the share of a micro-batch's tokens that gets a gradient", RATIO)
    token_rule: TokenRule = option("advantage_entropy", "by what tokens are ranked", one_of(*get_args(TokenRule)))
    token_scope: TokenScope = option("batch", "of the micro-batch, or of each sequence", one_of(*get_args(TokenScope)))
    drop_zeros: bool = option(False, "leave tokens of score 0 out", FLAG)


@dataclass
class D3SPolicyLossConfig(D3SLossOptions, EspoOptions, PolicyLossConfig):  # type: ignore[misc]  # verl has no types
    """verl's section ``actor_rollout_ref.actor.policy_loss`` with the options of ``d3s``, and with those of ``espo``
    for ``base_loss=espo``.

    verl's own class refuses unknown keys; ``policy_loss._target_`` selects this class instead.

    Raises:
        ValueError: a bad value; the message names the option, the value and the accepted values.
    """

    loss_mode: str = "d3s"

    def __post_init__(self) -> None:
        check_options(self, f"{POLICY_LOSS}.")
        check_token_rule(self, f"{POLICY_LOSS}.")


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
    """``base_loss`` on all tokens of a micro-batch, with gradient only through the ``token_ratio`` with top scores.

    verl does not pass entropies to a policy loss. So a token's score is ``|advantage| * surprisal``, where the
    surprisal of the sampled token is ``-old_log_prob``: an unbiased one-sample estimate of the entropy of the policy
    that sampled it. The choice is noisier than with the entropy. Exactly k tokens are chosen, as in
    :func:`d3s_kernels.select_tokens`. The base loss still sees every token in its ratios, clipping metrics and
    denominators; the log-probabilities of tokens that are not chosen are constants.

    Args:
        old_log_prob, log_prob, advantages: float ``[B, T]``.
        response_mask: bool or int ``[B, T]``.
        loss_agg_mode, config, rollout_is_weights: passed to the base loss. ``config.policy_loss`` has the options
            ``base_loss`` ("vanilla"), ``token_ratio`` (0.20), ``token_rule`` ("advantage_entropy"; the others read the
            surprisal as entropy too), ``token_scope`` ("batch", which is the micro-batch here, or "sequence") and
            ``drop_zeros`` (False).

    Returns:
        What the base loss returns.

    Raises:
        ValueError: no config, a bad option, or a base loss that verl does not know.
    """
    if config is None:
        raise ValueError("config: got None; takes the actor's configuration")
    options = of_policy_loss(D3SLossOptions, config.policy_loss)
    kept = select_tokens(
        -old_log_prob.detach(), advantages.detach(), options.token_ratio, rule=options.token_rule,
        mask=response_mask.bool(), scope=options.token_scope, drop_zeros=options.drop_zeros,
    ).mask  # fmt: skip
    base_loss = get_policy_loss_fn(options.base_loss)
    result: tuple[Tensor, dict[str, Any]] = base_loss(
        old_log_prob=old_log_prob,
        log_prob=torch.where(kept, log_prob, log_prob.detach()),
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    return result
