"""The policy loss ``d3s`` of verl: another policy loss, with gradient through the top K % of the tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

from ...tokens import select_tokens
from .._options import check_options
from .options import POLICY_LOSS, EspoOptions

_DEFAULTS: dict[str, Any] = {"base_loss": "vanilla", "token_ratio": 0.20, "token_scope": "batch", "drop_zeros": False}


def _options(policy_loss: Any) -> dict[str, Any]:
    options = {key: policy_loss.get(key, default) for key, default in _DEFAULTS.items()}
    check_options(options, f"{POLICY_LOSS}.")
    return options


@dataclass
class D3SPolicyLossConfig(EspoOptions, PolicyLossConfig):  # type: ignore[misc]  # verl has no types
    """verl's section ``actor_rollout_ref.actor.policy_loss`` with the options of ``d3s``, and, for
    ``base_loss=espo``, of ``espo``.

    verl's own class refuses keys that it does not know; ``policy_loss._target_`` puts this one in its place.

    Raises:
        ValueError: a bad value, naming the option, what was given and what is taken.
    """

    loss_mode: str = "d3s"
    base_loss: str = _DEFAULTS["base_loss"]
    token_ratio: float = _DEFAULTS["token_ratio"]
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
    """``base_loss`` on all tokens, with gradient through the ``token_ratio`` of the micro-batch that scores highest.

    verl hands a policy loss no entropy. So a token's score is ``|advantage| * surprisal``, with the surprisal
    ``-old_log_prob`` of the sampled token: an unbiased estimate, from one sample, of the entropy of the policy that
    sampled it; what is chosen is noisier than by the entropy. Exactly k tokens are chosen, as in
    :func:`d3s_kernels.select_tokens`. Nothing is left out of the base loss: its ratios, clipping metrics and
    denominators see every token, and the log-probabilities of the others are constants to it.

    Args:
        old_log_prob, log_prob, advantages: float ``[B, T]``.
        response_mask: bool or int ``[B, T]``.
        loss_agg_mode, config, rollout_is_weights: handed to the base loss. ``config.policy_loss`` has the options
            ``base_loss`` ("vanilla"), ``token_ratio`` (0.20), ``token_scope`` ("batch", which is the micro-batch here,
            or "sequence") and ``drop_zeros`` (False).

    Returns:
        what the base loss returns.

    Raises:
        ValueError: no config, a bad option, or a base loss that verl does not know.
    """
    if config is None:
        raise ValueError("config: got None; takes the actor's configuration")
    options = _options(config.policy_loss)
    kept = select_tokens(
        -old_log_prob.detach(), advantages.detach(), options["token_ratio"],
        mask=response_mask.bool(), scope=options["token_scope"], drop_zeros=options["drop_zeros"],
    ).mask  # fmt: skip
    base_loss = get_policy_loss_fn(options["base_loss"])
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
