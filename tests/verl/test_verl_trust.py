"""Tokens that were sampled with another probability: verl's own masks are those of ours, and its update costs less.

Real: verl's rollout correction, its losses, and its trainer with its storage.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl_world import a_step, draw_rewards, make_trainer, rows_of

from d3s_kernels import trusted_tokens
from d3s_kernels.integrations.verl.options import D3SOptions

SECTION = "trainer.v1.d3s_sync"


def near(rows: int = 12, tokens: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """The first sequence is as it was sampled, the last one far from it: every rule tells these two apart."""
    logprob = -3 * torch.rand(rows, tokens)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1))
    sampled = logprob + 0.2 * torch.randn(rows, tokens) + torch.linspace(-0.1, 0.1, rows)[:, None]
    sampled[0], sampled[-1] = logprob[0], logprob[-1] + 2
    return logprob, sampled, mask


@pytest.mark.parametrize(
    ("name", "bounds", "rule", "low", "high"),
    [
        (
            "token_k1",
            f"{1 / 1.3}_{1 / 0.8}",
            "token_mask",
            0.8,
            1.3,
        ),  # verl bounds q / p: its bounds are the inverse ones
        ("seq_sum_k1", f"{1 / 2.5}_{1 / 0.3}", "sequence_mask", 0.3, 2.5),
        ("seq_mean_k1", f"{1 / 1.08}_{1 / 0.9}", "geometric_mask", 0.9, 1.08),
        ("token", "0.7_1.4", "token_mask", 0.7, 1.4),
        ("token", "1.4", "token_truncate", 0.0, 1.4),
        ("sequence", "0.7_1.4", "sequence_mask", 0.7, 1.4),
        ("sequence", "1.4", "sequence_truncate", 0.0, 1.4),
    ],
)
def test_rejections_and_weights_of_verl(name: str, bounds: str, rule: Any, low: float, high: float) -> None:
    logprob, sampled, mask = near()
    ours = trusted_tokens(logprob, sampled, rule, low=low, high=high, mask=mask)
    if "_" in name:
        theirs, _ = compute_rollout_rejection_mask(logprob - sampled, mask.long(), name, bounds)
        assert ours.mask.equal(theirs.bool())
    else:
        theirs, _ = compute_rollout_correction_weights(logprob - sampled, mask.long(), name, bounds)
        torch.testing.assert_close(ours.weight, theirs, rtol=1e-5, atol=1e-7)
    assert (0 < ours.count < mask.sum()) == rule.endswith("_mask")


# ---- the trainer mode ------------------------------------------------------------------------------------------------

OPTIONS = (
    "actor_rollout_ref.rollout.calculate_log_probs=true", f"+{SECTION}.rollouts_start=4", f"+{SECTION}.rollouts_end=4",
    f"+{SECTION}.token_ratio_start=1.0", f"+{SECTION}.token_ratio_end=1.0",
)  # fmt: skip
FIELDS = ("advantages", "response_mask", "loss_mask", "old_log_probs", "rollout_log_probs")


def step_of(*overrides: str, denominator: str = "all") -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The trainer, rows and metrics of a step. Each token was sampled with exp(-0.5)."""
    given = *OPTIONS, f"+{SECTION}.loss_denominator={denominator}", *overrides
    trainer, batch, metrics = a_step(draw_rewards(), *given)
    return trainer, rows_of(batch, *FIELDS), metrics


def expected(rows: dict[str, Any], rule: Any, **bounds: Any) -> dict[str, Tensor]:
    """The weight of each token of each row."""
    found = {}
    for key, row in rows.items():
        given = row["old_log_probs"][None], row["rollout_log_probs"][None]
        mask = torch.arange(len(row["loss_mask"]))[None] > 0  # the first token is a tool's
        each = row["advantages"][None, -1]
        found[key] = trusted_tokens(*given, rule, mask=mask, advantages=each, **bounds).weight[0]
    return found


@pytest.mark.parametrize(
    ("rule", "low", "high", "denominator"), [("token_mask", 0.8, 1.3, "kept"), ("sequence_error", None, 1.3, "all")]
)
def test_a_rule_of_ours(queue: None, rule: str, low: Any, high: Any, denominator: str) -> None:
    bounds = {"high": high} if low is None else {"low": low, "high": high}
    words = [f"+{SECTION}.off_policy_{name}={value}" for name, value in bounds.items()]
    trainer, rows, metrics = step_of(f"+{SECTION}.off_policy_rule={rule}", *words, denominator=denominator)
    weights = expected(rows, rule, **bounds)
    kept = sum(int((weight > 0).sum()) for weight in weights.values())
    everything = sum(len(weight) - 1 for weight in weights.values())
    assert 0 < kept < everything
    assert metrics["d3s/off_policy_share"] == pytest.approx(1 - kept / everything)
    for key, weight in weights.items():
        assert rows[key]["response_mask"].bool().equal(weight > 0)
        assert rows[key]["loss_mask"].sum() == (len(weight) - 1 if denominator == "all" else (weight > 0).sum())
        assert trainer.actor_rollout_wg.tokens_with_gradient(key).equal(weight > 0)
        if low is not None:  # the gradient is weighed by the ratio
            grad = trainer.actor_rollout_wg.log_probs[key].grad
            share = grad[weight > 0] / (rows[key]["advantages"] * weight)[weight > 0]
            torch.testing.assert_close(share, share[:1].expand_as(share), rtol=1e-4, atol=0)


VERLS = "algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold"
OUR_RULE = f"+{SECTION}.off_policy_rule=kpop", f"+{SECTION}.off_policy_high=0.0"


@pytest.mark.parametrize("rule", [OUR_RULE, (VERLS[0], f"{VERLS[1]}=0.0001_0.0002")], ids=["ours", "verl's"])
def test_where_nothing_is_trusted_nothing_is_learnt(queue: None, rule: tuple[str, ...]) -> None:
    trainer, rows, metrics = step_of(*rule, denominator="kept")
    assert metrics["d3s/off_policy_share"] == 1
    assert all(math.isfinite(loss) for loss in trainer.actor_rollout_wg.losses)
    assert not any(trainer.actor_rollout_wg.tokens_with_gradient(key).any() for key in rows)


def test_verls_own_rejections_are_counted(queue: None) -> None:
    _, rows, metrics = step_of(VERLS[0], f"{VERLS[1]}=0.8_1.25")
    left = sum(int(row["response_mask"].sum()) for row in rows.values())
    everything = sum(len(row["response_mask"]) - 1 for row in rows.values())
    assert 0 < left < everything
    assert metrics["d3s/off_policy_share"] == pytest.approx(1 - left / everything)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.calculate_log_probs=false", "calculate_log_probs: got False; d3s_sync takes True"),
        ("algorithm.rollout_correction.rollout_is=token", "rollout_is: got 'token'; d3s_sync takes null: trainer"),
        (f"+{SECTION}.off_policy_high=0.1", "off_policy_high: got 0.1; takes a number of at least .*low, 0.5"),
    ],
)
def test_what_does_not_go_together(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(*OPTIONS, f"+{SECTION}.off_policy_rule=token_mask", override)
    assert D3SOptions().off_policy_rule == "none"
