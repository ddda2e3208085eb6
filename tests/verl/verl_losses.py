"""What the tests of the policy losses share: verl's own configuration of an actor, a batch, and a loss with its
gradient."""

from __future__ import annotations

from typing import Any

import torch
from composed import composed
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
TARGET = f"{POLICY_LOSS}._target_=d3s_kernels.integrations.verl.loss.D3SPolicyLossConfig"


def actor_config(*overrides: str) -> Any:
    """The configuration of an actor, made as verl's workers make it."""
    config = composed("actor_rollout_ref.actor.use_dynamic_bsz=true", *overrides)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def options(loss: str, **values: Any) -> list[str]:
    """The overrides that select one of our losses, with its options."""
    return [f"{POLICY_LOSS}.loss_mode={loss}", TARGET, *(f"+{POLICY_LOSS}.{key}={v}" for key, v in values.items())]


def make_batch(lengths: Tensor, moves: float) -> dict[str, Tensor]:
    """Responses of these lengths, with log-probabilities that have moved since."""
    rows, length = len(lengths), int(lengths.max())
    old, mask = -torch.rand(rows, length) * 3 - 0.05, torch.arange(length) < lengths.unsqueeze(-1)
    return {
        "old_log_prob": old,
        "log_prob": (old + moves * torch.randn(rows, length)).requires_grad_(),
        "advantages": torch.randn(rows, 1).expand(rows, length) * mask,
        "response_mask": mask,
        "rollout_is_weights": torch.rand(rows, length) + 0.5,
    }


def gradient(name: str, batch: dict[str, Tensor], config: Any, agg: str = "token-mean") -> tuple[Tensor, Tensor]:
    loss, metrics = get_policy_loss_fn(name)(**batch, loss_agg_mode=agg, config=config)
    assert isinstance(metrics, dict)
    (grad,) = torch.autograd.grad(loss, batch["log_prob"])
    return loss.detach(), grad
