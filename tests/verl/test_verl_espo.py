"""The policy loss ``espo``, against the paper's formulas in a plain loop, and through verl's own calls."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import groups_of
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl_losses import POLICY_LOSS, actor_config, gradient

VOCAB_SIZE = 1000
OURS = (
    f"{POLICY_LOSS}.loss_mode=espo",
    f"{POLICY_LOSS}._target_=d3s_kernels.integrations.verl.loss.D3SPolicyLossConfig",
)


def options(**values: Any) -> list[str]:
    values = {"vocab_size": VOCAB_SIZE, "entropy_source": "surprisal", **values}
    return [*OURS, *(f"+{POLICY_LOSS}.{key}={value}" for key, value in values.items())]


def make_batch(rows: int = 5, length: int = 17) -> dict[str, Tensor]:
    """Completions of several lengths, one of a single token, and one row of padding. Some tokens are clipped."""
    old = -torch.rand(rows, length) * 3 - 0.05
    lengths = torch.tensor([length, 1, 0, *torch.randint(2, length, (rows - 3,)).tolist()])
    mask = torch.arange(length) < lengths.unsqueeze(-1)
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.01 * torch.randn(rows, length)).requires_grad_(),
        "advantages": torch.randn(rows, 1).expand(rows, length) * mask,
        "response_mask": mask,
        "rollout_is_weights": torch.rand(rows, length) + 0.5,
    }


def espo_in_a_loop(batch: dict[str, Tensor], entropy: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """Eq. 5 with eq. 8 to 10, negated, in float64: the sum over sequences."""
    total = torch.zeros((), dtype=torch.float64)
    for row, mask in enumerate(batch["response_mask"]):
        log_prob, old = batch["log_prob"][row].double(), batch["old_log_prob"][row].double()
        groups = groups_of(entropy[row], mask, quantiles)
        for members in groups:
            moved = sum(log_prob[t] - old[t] for t in members) / len(members)
            epsilon = 0.02 / math.log(VOCAB_SIZE) * sum(float(entropy[row, t]) for t in members) / len(members)
            # Where a ratio is within rounding of its bound, either side may be taken.
            assume(abs(abs(math.exp(float(moved.detach())) - 1) - epsilon) > 1e-6)
            for t in members:
                advantage = batch["advantages"][row, t]
                ratio = torch.exp(moved.detach() + log_prob[t] - log_prob[t].detach())
                gain = torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
                total = total - batch["rollout_is_weights"][row, t] * gain / (len(members) * len(groups))
    return total


config_of = functools.cache(lambda quantiles: actor_config(*options(quantiles=list(quantiles))))


@given(st.sampled_from([(), (0.8,), (0.5,), (0.3, 0.6, 0.9)]))
def test_the_papers_objective_and_its_gradient(quantiles: tuple[float, ...]) -> None:
    """Entropy is replaced by surprisal, which needs only the arguments of the loss."""
    batch = make_batch()
    loss, found = gradient("espo", batch, config_of(quantiles))
    expected = espo_in_a_loop(batch, -batch["old_log_prob"], quantiles) / 4  # sequences, without the row of padding
    (expected_gradient,) = torch.autograd.grad(expected, batch["log_prob"])
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected_gradient, rtol=1e-4, atol=1e-7)


def test_the_aggregation_is_the_papers() -> None:
    """The actor's aggregation has no effect. The mean is over the whole update, not this one micro-batch."""
    batch, config = make_batch(), actor_config(*options())
    by_sequence = gradient("espo", batch, config, "seq-mean-token-mean")
    by_token = gradient("espo", batch, config, "token-mean")
    assert torch.equal(by_token[0], by_sequence[0])
    assert torch.equal(by_token[1], by_sequence[1])
    config.global_batch_info.update(dp_size=2, batch_num_tokens=77, global_batch_size=16)
    loss, grad = gradient("espo", batch, config)
    torch.testing.assert_close(loss, by_sequence[0] * 4 / 16 * 2)
    torch.testing.assert_close(grad, by_sequence[1] * 4 / 16 * 2)


@pytest.mark.parametrize("mask_type", [torch.bool, torch.int64])
def test_one_group_is_gspo(mask_type: torch.dtype) -> None:
    """With a range that clips nothing, it equals verl's own loss `gspo`."""
    batch = make_batch()
    batch["response_mask"] = batch["response_mask"].to(mask_type)
    ours = gradient("espo", batch, actor_config(*options(quantiles=[], alpha=1e4)))
    wide = actor_config("actor_rollout_ref.actor.clip_ratio_low=1e3", "actor_rollout_ref.actor.clip_ratio_high=1e3")
    verls = gradient("gspo", batch, wide, "seq-mean-token-mean")
    torch.testing.assert_close(ours, verls, rtol=1e-5, atol=1e-7)


def test_the_printed_denominator() -> None:
    """The group's ratio times the token's own. With one token in a group both are equal, so the product is a square."""
    batch = make_batch()
    batch["response_mask"] = torch.arange(17) < torch.ones(5, 1)
    own, _ = gradient("espo", batch, actor_config(*options(alpha=1e4)))
    printed, grad = gradient("espo", batch, actor_config(*options(alpha=1e4, denominator="old")))
    squared = torch.exp(2 * (batch["log_prob"] - batch["old_log_prob"])).detach()
    factors = batch["advantages"] * batch["rollout_is_weights"] * batch["response_mask"]
    torch.testing.assert_close(printed, -(factors * squared)[:, 0].mean())
    torch.testing.assert_close(grad, -factors * squared / 5)
    assert printed != own


def test_metrics() -> None:
    """A row moves by 0.5, 1 or 2 epsilon. By 2 it is clipped if it moves in the direction of its advantage."""
    batch = make_batch()
    mask, old = batch["response_mask"], batch["old_log_prob"]
    lengths = mask.sum(-1)
    epsilon = 0.02 / math.log(VOCAB_SIZE) * (-old * mask).sum(-1) / lengths.clamp(min=1)
    step = torch.tensor([0.5, -0.5, 1.0, 2.0, -2.0])
    batch["log_prob"] = old + (step * epsilon).unsqueeze(-1)
    _, metrics = get_policy_loss_fn("espo")(**batch, config=actor_config(*options(quantiles=[])))
    clipped = (step.abs() > 1) & (step * batch["advantages"][:, 0] > 0)
    of_tokens = {"espo_epsilon": epsilon, "pg_clipfrac": clipped.float(), "ppo_kl": -step * epsilon}
    assert metrics == {
        f"actor/{name}": pytest.approx(float((values * lengths).sum() / lengths.sum()), abs=1e-6)
        for name, values in of_tokens.items()
    }


def test_rows_of_padding_alone() -> None:
    """An empty micro-batch still has a gradient, of zeros."""
    batch, config = make_batch(), actor_config(*options())
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    config.global_batch_info.update(global_batch_size=8)
    loss, grad = gradient("espo", batch, config)
    assert loss == 0
    assert not grad.any()


# ---- options -----------------------------------------------------------------------------------------------------


def test_its_options_have_defaults() -> None:
    config = actor_config(*OURS).policy_loss
    assert type(config).__name__ == "D3SPolicyLossConfig"
    assert (config.quantiles, config.alpha, config.denominator) == ([0.8], 0.02, "self")
    assert (config.vocab_size, config.entropy_source) == (None, "old")
    assert config.clip_cov_ratio == 0.0002  # verl's own options are all there


def test_the_vocabulary_of_the_model() -> None:
    """verl's worker stores the model's configuration there."""
    batch = make_batch()
    config = actor_config(*options(vocab_size="null"))
    with pytest.raises(ValueError, match=r"policy_loss\.vocab_size: got None, and no model to ask"):
        gradient("espo", batch, config)
    text = SimpleNamespace(vocab_size=VOCAB_SIZE)
    config.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))

    def epsilon(config: Any) -> float:
        return get_policy_loss_fn("espo")(**batch, config=config)[1]["actor/espo_epsilon"]

    given_size = epsilon(actor_config(*options()))
    assert epsilon(config) == given_size > 0
    text.vocab_size = 2
    assert epsilon(config) > 5 * given_size  # log 1000 over log 2


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("quantiles", [0.8, 0.2], r"rising numbers in \(0, 1\), at most 15"),
        ("quantiles", [0.5, 1.0], r"rising numbers in \(0, 1\), at most 15"),
        ("quantiles", 0.8, r"rising numbers in \(0, 1\), at most 15"),
        ("alpha", 0, "a number above 0"),
        ("denominator", "new", "'self' or 'old'"),
        ("vocab_size", 1, "a whole number of at least 2"),
        ("entropy_source", "rollout", "'old' or 'update' or 'surprisal'"),
    ],
)
def test_bad_options(key: str, value: Any, takes: str) -> None:
    target = f"{POLICY_LOSS}._target_=d3s_kernels.integrations.verl.loss.D3SPolicyLossConfig"
    with pytest.raises(Exception, match=rf"policy_loss\.{key}: got .*; takes {takes}"):
        actor_config(target, f"+{POLICY_LOSS}.{key}={value}")


def test_no_config() -> None:
    with pytest.raises(ValueError, match="config: got None"):
        get_policy_loss_fn("espo")(**make_batch())


@pytest.mark.parametrize("source", ["old", "update"])
def test_called_by_something_else(source: str) -> None:
    config = actor_config(*options(entropy_source=source))
    with pytest.raises(ValueError, match=rf"entropy_source: got '{source}'; takes 'surprisal' where"):
        gradient("espo", make_batch(), config)
