"""The entropies of a micro-batch, within reach of a policy loss.

verl hands a policy loss no entropy. But ``ppo_loss``, which calls the policy loss, is given them: the old policy's
among the micro-batch's fields, where one of verl's V1 trainers made it, and those of the policy that is updated in the
model's output, where ``actor.calculate_entropy`` is true. Importing this module puts a wrapper in the place of
``ppo_loss``: while it runs, :func:`token_entropy` finds both. It changes nothing else.
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from .options import POLICY_LOSS

_MICRO_BATCH: ContextVar[tuple[Any, Any]] = ContextVar("the model's output, and the fields of the micro-batch")
_OPTION = f"{POLICY_LOSS}.entropy_source"
_TAKES = ["config", "model_output", "data"]


def token_entropy(source: str, old_log_prob: Tensor) -> Tensor:
    """An entropy for each token, without a gradient.

    Args:
        source: "old": the old policy's; "update": that of the policy that is updated; "surprisal": ``-old_log_prob``,
            an unbiased estimate of the old policy's, from the one token that was sampled.
        old_log_prob: ``[B, T]``.

    Returns:
        ``[B, T]``, nats.

    Raises:
        ValueError: verl has no such entropy at this place.
    """
    if source == "surprisal":
        return -old_log_prob.detach()
    try:
        model_output, data = _MICRO_BATCH.get()
    except LookupError:
        raise ValueError(
            f"{_OPTION}: got {source!r}; takes 'surprisal' where the policy loss is not called by verl's ppo_loss"
        ) from None
    entropy = _of_old_policy(data) if source == "old" else _of_updated_policy(model_output, data)
    if entropy.shape != old_log_prob.shape:
        raise ValueError(f"entropy: got shape {list(entropy.shape)}; takes that of old_log_prob, {old_log_prob.shape}")
    return entropy.detach()


def _of_old_policy(data: Any) -> Tensor:
    if "entropy" not in data:
        raise ValueError(
            f"{_OPTION}: got 'old', and rows without it; takes 'update' or 'surprisal' with a trainer that does not "
            "store the entropy of the old policy (verl's V1 trainers do, except in bypass mode)"
        )
    entropy: Tensor = data.select("entropy").to_padded_tensor()["entropy"]
    return entropy


def _of_updated_policy(model_output: Any, data: Any) -> Tensor:
    entropy = model_output.get("entropy")
    if entropy is None:
        raise ValueError(f"{_OPTION}: got 'update', which takes actor_rollout_ref.actor.calculate_entropy=true")
    padded: Tensor = no_padding_2_padding(entropy, data)
    return padded


def _wrap_ppo_loss() -> None:
    original = losses.ppo_loss
    parameters = list(inspect.signature(original).parameters)
    if parameters[:3] != _TAKES:
        raise RuntimeError(f"verl's ppo_loss takes {parameters}; expected {_TAKES} first, as in verl 0.9.1")

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        before = _MICRO_BATCH.set((model_output, data))
        try:
            return original(config, model_output, data, *args, **kwargs)
        finally:
            _MICRO_BATCH.reset(before)

    # Who imports it from now on gets the wrapper; these two may have been there before.
    for name in (losses.__name__, "verl.workers.engine_workers", "verl.trainer.distillation.losses"):
        module: Any = sys.modules.get(name)
        if getattr(module, "ppo_loss", None) is original:
            module.ppo_loss = ppo_loss


_wrap_ppo_loss()
