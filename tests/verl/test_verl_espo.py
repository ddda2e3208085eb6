"""The policy loss ``espo``, against the paper's formulas, and through verl's own calls."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_espo_terms import VOCAB_SIZE, objective_in_a_loop
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl_losses import actor_config, gradient, make_batch, options


def options_of(**values: Any) -> list[str]:
    return options("espo", **{"vocab_size": VOCAB_SIZE, "entropy_source": "surprisal", **values})


def a_batch() -> dict[str, Tensor]:
    """Completions of several lengths, one of a single token, and one row of padding. Some tokens are clipped."""
    return make_batch(torch.tensor([17, 1, 0, *torch.randint(2, 17, (2,)).tolist()]), moves=0.01)


config_of = functools.cache(lambda quantiles: actor_config(*options_of(quantiles=list(quantiles))))


@given(st.sampled_from([(), (0.8,), (0.5,), (0.3, 0.6, 0.9)]))
def test_the_papers_objective_and_its_gradient(quantiles: tuple[float, ...]) -> None:
    """Entropy is replaced by surprisal, which needs only the arguments of the loss."""
    batch = a_batch() | {"rollout_is_weights": (torch.rand(5, 1) + 0.5).expand(5, 17)}
    loss, found = gradient("espo", batch, config_of(quantiles))
    logprob, old, mask = batch["log_prob"], batch["old_log_prob"], batch["response_mask"]
    of_paper = {"logprob": logprob, "old_logprob": old, "entropy": -old, "mask": mask}
    weighed = (batch["advantages"] * batch["rollout_is_weights"])[:, 0]
    expected = -objective_in_a_loop(of_paper, weighed, quantiles)
    (expected_gradient,) = torch.autograd.grad(expected, logprob)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected_gradient, rtol=1e-4, atol=1e-7)


def test_the_aggregation_is_the_papers() -> None:
    """The actor's aggregation has no effect. The mean is over the whole update, not this one micro-batch."""
    batch, config = a_batch(), actor_config(*options_of())
    by_sequence = gradient("espo", batch, config, "seq-mean-token-mean")
    by_token = gradient("espo", batch, config, "token-mean")
    assert torch.equal(by_token[0], by_sequence[0])
    assert torch.equal(by_token[1], by_sequence[1])
    config.global_batch_info.update(dp_size=2, batch_num_tokens=77, global_batch_size=16)
    loss, grad = gradient("espo", batch, config)
    torch.testing.assert_close(loss, by_sequence[0] * 4 / 16 * 2)
    torch.testing.assert_close(grad, by_sequence[1] * 4 / 16 * 2)


def test_metrics() -> None:
    """A row moves by 0.5, 1 or 2 epsilon. By 2 it is clipped if it moves in the direction of its advantage."""
    batch = a_batch()
    mask, old = batch["response_mask"], batch["old_log_prob"]
    lengths = mask.sum(-1)
    epsilon = 0.02 / math.log(VOCAB_SIZE) * (-old * mask).sum(-1) / lengths.clamp(min=1)
    step = torch.tensor([0.5, -0.5, 1.0, 2.0, -2.0])
    batch["log_prob"] = old + (step * epsilon).unsqueeze(-1)
    _, metrics = get_policy_loss_fn("espo")(**batch, config=actor_config(*options_of(quantiles=[])))
    clipped = (step.abs() > 1) & (step * batch["advantages"][:, 0] > 0)
    of_tokens = {"espo_epsilon": epsilon, "pg_clipfrac": clipped.float(), "ppo_kl": -step * epsilon}
    assert metrics == {
        f"actor/{name}": pytest.approx(float((values * lengths).sum() / lengths.sum()), abs=1e-6)
        for name, values in of_tokens.items()
    }


def test_the_vocabulary_of_the_model() -> None:
    """verl's worker stores the model's configuration there."""
    batch = a_batch()
    config = actor_config(*options_of(vocab_size="null"))
    with pytest.raises(ValueError, match=r"policy_loss\.vocab_size: got None, and no model to ask"):
        gradient("espo", batch, config)
    text = SimpleNamespace(vocab_size=VOCAB_SIZE)
    config.model_config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=lambda: text))

    def epsilon(config: Any) -> float:
        return get_policy_loss_fn("espo")(**batch, config=config)[1]["actor/espo_epsilon"]

    given_size = epsilon(actor_config(*options_of()))
    assert epsilon(config) == given_size > 0
    text.vocab_size = 2
    assert epsilon(config) > 5 * given_size  # log 1000 over log 2


@pytest.mark.parametrize("source", ["old", "update"])
def test_called_by_something_else(source: str) -> None:
    config = actor_config(*options_of(entropy_source=source))
    with pytest.raises(ValueError, match=rf"entropy_source: got '{source}'; takes 'surprisal' where"):
        gradient("espo", a_batch(), config)
