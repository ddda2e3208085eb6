"""importance_ratio against the ratios inside verl's own losses, derived from the loss where nothing is clipped."""

from typing import Any

import pytest
import torch

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl_losses import actor_config, gradient, make_batch

from d3s_kernels import importance_ratio

WIDE = [f"actor_rollout_ref.actor.clip_ratio_{side}=1e12" for side in ("low", "high", "c")]


@pytest.mark.parametrize(("loss", "level", "limit"), [("gspo", "sequence", 10), ("vanilla", "token", 20)])
def test_ratios_are_those_inside_verls_losses(loss: str, level: Any, limit: float) -> None:
    """With their clamps, which the first row reaches. With advantages of 1, a row's loss is minus its mean ratio."""
    batch = make_batch(torch.tensor([12, 1, *torch.randint(2, 12, (4,)).tolist()]), moves=1.0)
    del batch["rollout_is_weights"]
    batch["advantages"] = torch.ones(6, 12)
    with torch.no_grad():
        batch["log_prob"][0] = batch["old_log_prob"][0] + limit + 0.5
        batch["log_prob"][1] = batch["old_log_prob"][1] + limit - 0.5
    for row in range(6):
        of_row = {name: values[row : row + 1].detach() for name, values in batch.items()}
        log_prob, mask = of_row["log_prob"].requires_grad_(), of_row["response_mask"]
        verls_loss, verls_gradient = gradient(loss, of_row, actor_config(*WIDE), "seq-mean-token-mean")
        ratio = importance_ratio(log_prob, of_row["old_log_prob"], mask, level=level)
        mean = (ratio * mask).sum() / mask.sum()
        (found,) = torch.autograd.grad(-mean, log_prob)
        torch.testing.assert_close(-mean.detach(), verls_loss, rtol=2e-5, atol=1e-8)
        torch.testing.assert_close(found, verls_gradient, rtol=2e-5, atol=1e-8)
