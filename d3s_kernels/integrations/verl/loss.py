"""The policy loss ``d3s`` for verl: wraps another policy loss and lets gradient flow only through the top tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

from ...tokens import select_tokens
from .._options import check_options, check_token_rule
from .options import POLICY_LOSS, EspoOptions

_DEFAULTS: dict[str, Any] = {
    "base_loss": "vanilla", "token_ratio": 0.20, "token_rule": "advantage_entropy", "token_scope": "batch",
    "drop_zeros": False,
}  # fmt: skip


def _options(policy_loss: Any) -> SimpleNamespace:
    options = {key: policy_loss.get(key, default) for key, default in _DEFAULTS.items()}
    check_options(options, f"{POLICY_LOSS}.")
    checked = SimpleNamespace(**options)
    check_token_rule(checked, f"{POLICY_LOSS}.")
    return checked


@dataclass
class D3SPolicyLossConfig(EspoOptions, PolicyLossConfig):  # type: ignore[misc]  # verl has no types
    """verl's section ``actor_rollout_ref.actor.policy_loss`` with the options of ``d3s``, and with those of ``espo``
    for ``base_loss=espo``.

    verl's own class refuses unknown keys; ``policy_loss._target_`` selects this class instead.

    Raises:
        ValueError: a bad value; the message names the option, the value and the accepted values.
    """

    loss_mode: str = "d3s"
    base_loss: str = _DEFAULTS["base_loss"]
    token_ratio: float = _DEFAULTS["token_ratio"]
    token_rule: str = _DEFAULTS["token_rule"]
    token_scope: str = _DEFAULTS["token_scope"]
    drop_zeros: bool = _DEFAULTS["drop_zeros"]

    def __post_init__(self) -> None:
        _options(self)
        EspoOptions.from_config(self)


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
    options = _options(config.policy_loss)
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
