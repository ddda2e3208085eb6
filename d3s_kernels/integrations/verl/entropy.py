"""Makes the entropies of a micro-batch available to a policy loss, and weighs verl's KL loss and entropy bonus.

verl does not pass entropies to a policy loss. But ``ppo_loss``, the function that calls the policy loss, receives
entropies. With V1 trainers, the micro-batch contains the old policy's entropies. With ``actor.calculate_entropy``, the
model's output contains the updated policy's entropies. While our wrapper of ``ppo_loss`` runs, :func:`token_entropy`
can read the micro-batch and the model's output.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from .cuts import WEIGHED, WEIGHT
from .options import POLICY_LOSS
from .replaced import Replaced

_MICRO_BATCH: ContextVar[tuple[Any, Any]] = ContextVar("the model's output, and the fields of the micro-batch")
_OPTION = f"{POLICY_LOSS}.entropy_source"


def token_entropy(source: str, old_log_prob: Tensor) -> Tensor:
    """Returns the entropy of each token for a policy loss, without a gradient.

    Args:
        source: "old": the entropy of the old policy; "update": the entropy of the updated policy; "surprisal":
            ``-old_log_prob``, an unbiased estimate of the old policy's entropy from the one sampled token.
        old_log_prob: ``[B, T]``. The result has the same shape, and is in nats.

    Raises:
        ValueError: verl has not computed the entropies that ``source`` names, or their shape differs from the shape of
            ``old_log_prob``.
    """
    if source == "surprisal":
        return -old_log_prob.detach()
    try:
        model_output, data = _MICRO_BATCH.get()
    except LookupError:
        raise ValueError(
            f"{_OPTION}: got {source!r}; takes 'surprisal' where the policy loss is not called by verl's ppo_loss"
        ) from None
    if source == "old":
        if "entropy" not in data:
            raise ValueError(
                f"{_OPTION}: got 'old', and rows without it; takes 'update' or 'surprisal' with a trainer that does "
                "not store the entropy of the old policy (verl's V1 trainers do, except in bypass mode)"
            )
        entropy: Tensor = data.select("entropy").to_padded_tensor()["entropy"]
    else:
        if model_output.get("entropy") is None:
            raise ValueError(f"{_OPTION}: got 'update', which takes actor_rollout_ref.actor.calculate_entropy=true")
        entropy = no_padding_2_padding(model_output["entropy"], data)
    if entropy.shape != old_log_prob.shape:
        raise ValueError(f"entropy: got shape {list(entropy.shape)}; takes that of old_log_prob, {old_log_prob.shape}")
    return entropy.detach()


def _ppo_loss(original: Any, config: Any, model_output: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls verl's ``ppo_loss``. During this call, :func:`token_entropy` can read the micro-batch."""
    before = _MICRO_BATCH.set((model_output, data))
    try:
        loss, metrics = original(config, model_output, data, *args, **kwargs)
    finally:
        _MICRO_BATCH.reset(before)
    return loss, metrics | {WEIGHED: 1.0} if WEIGHT in data else metrics


def _agg_loss(original: Any, loss_mat: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Sums up the KL loss or the entropy bonus as verl does. In rollouts that were cut, each token has a weight."""
    data = _MICRO_BATCH.get((None, {}))[1]
    if WEIGHT in data:
        loss_mat = loss_mat * data.select(WEIGHT).to_padded_tensor()[WEIGHT]
    return original(loss_mat, *args, **kwargs)


REPLACED = (
    Replaced(
        losses, "ppo_loss", ["config", "model_output", "data"], _ppo_loss,
        held_by=("verl.workers.engine_workers", "verl.trainer.distillation.losses"), passes_the_rest_on=True,
    ),
    # verl's ``ppo_loss`` calls the function by this name. Policy losses call it by its name in another module, so they
    # do not change.
    Replaced(losses, "agg_loss", ["loss_mat"], _agg_loss, passes_the_rest_on=True),
)  # fmt: skip
