"""importance_ratio against the ratios inside verl's own losses, derived from the loss where nothing is clipped."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl_losses import actor_config, gradient, make_batch

from d3s_kernels import importance_ratio

WIDE = [f"actor_rollout_ref.actor.clip_ratio_{side}=1e12" for side in ("low", "high")]


def a_batch(moves: float = 1.0) -> dict[str, Tensor]:
    batch = make_batch(torch.tensor([12, 1, *torch.randint(2, 12, (4,)).tolist()]), moves)
    del batch["rollout_is_weights"]
    return {**batch, "advantages": torch.ones(6, 12)}


def assert_ratio_of(loss: str, batch: dict[str, Tensor], level: Any, config: Any) -> Tensor:
    """With advantages of 1, the loss of a row is minus its mean ratio; their gradients for each token are equal too."""
    for row in range(len(batch["advantages"])):
        of_row = {name: values[row : row + 1].detach() for name, values in batch.items()}
        log_prob, mask = of_row["log_prob"].requires_grad_(), of_row["response_mask"]
        verls_loss, verls_gradient = gradient(loss, of_row, config, "seq-mean-token-mean")
        ratio = importance_ratio(log_prob, of_row["old_log_prob"], mask, level=level)
        mean = (ratio * mask).sum() / mask.sum()
        (found,) = torch.autograd.grad(-mean, log_prob)
        torch.testing.assert_close(-mean.detach(), verls_loss, rtol=2e-5, atol=1e-8)
        torch.testing.assert_close(found, verls_gradient, rtol=2e-5, atol=1e-8)
    return importance_ratio(batch["log_prob"], batch["old_log_prob"], batch["response_mask"], level=level)


def test_sequences_as_in_gspo() -> None:
    """With its clamp: above a log-ratio of 10 the ratio is e^10."""
    batch = a_batch()
    with torch.no_grad():
        batch["log_prob"][0] = batch["old_log_prob"][0] + 10.5
        batch["log_prob"][1] = batch["old_log_prob"][1] + 9.5
    ratio = assert_ratio_of("gspo", batch, "sequence", actor_config(*WIDE))
    assert ratio[0].tolist() == pytest.approx([math.exp(10)] * 12, rel=1e-5)
    assert (ratio[1:, 1:2] != 1).sum() > 1


@pytest.mark.parametrize("moves", [1.0, 15.0])
def test_tokens_as_in_vanilla(moves: float) -> None:
    """With its clamps at -20 and 20, which the larger moves reach, and without its second clipping."""
    config = actor_config(*WIDE, "actor_rollout_ref.actor.clip_ratio_c=1e12")
    batch = a_batch(moves)
    with torch.no_grad():
        batch["log_prob"][0, :3] = batch["old_log_prob"][0, :3] + moves * torch.tensor([-1.5, 0.0, 1.5])
    ratio = assert_ratio_of("vanilla", batch, "token", config)
    limits = [math.exp(-20), 1.0, math.exp(20)] if moves > 10 else [math.exp(-1.5), 1.0, math.exp(1.5)]
    assert ratio[0, :3].tolist() == pytest.approx(limits, rel=1e-5)
