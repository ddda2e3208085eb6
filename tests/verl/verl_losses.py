"""What the tests of the policy losses share: verl's own configuration of an actor, and a loss with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from composed import composed
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


def actor_config(*overrides: str) -> Any:
    """The configuration of an actor, made as verl's workers make it."""
    config = composed("actor_rollout_ref.actor.use_dynamic_bsz=true", *overrides)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def gradient(name: str, batch: dict[str, Tensor], config: Any, agg: str = "token-mean") -> tuple[Tensor, Tensor]:
    loss, metrics = get_policy_loss_fn(name)(**batch, loss_agg_mode=agg, config=config)
    assert isinstance(metrics, dict)
    (grad,) = torch.autograd.grad(loss, batch["log_prob"])
    return loss.detach(), grad
