"""ESPO inside TRL's loss: its objective (arXiv 2512.00499, eq. 5), written out, and through whole runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from test_trl_gradient import chosen, with_old_policy
from test_trl_training import trained
from tiny_trl import VOCABULARY, PlainTrainer, gradients, loss_and_gradients, micro_batch, model, trainer

ALPHA = 0.1  # so wide that some ratios are beyond their range and some are not
ESPO = {"importance_sampling_level": "entropy_group", "espo_alpha": ALPHA, "loss_type": "grpo"}


def scores(policy: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completion, with a graph, in float64."""
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = policy(tokens, attention_mask=attention).logits[:, -batch["completion_ids"].shape[1] - 1 : -1].double()
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(batch["completion_ids"]), distribution.entropy()


def groups_of(entropy: list[float], quantile: float) -> list[list[int]]:
    """The places of a sequence's tokens, the most uncertain last; no empty group."""
    ranked = sorted(range(len(entropy)), key=lambda place: (-entropy[place], place))
    high = math.ceil((1 - quantile) * len(entropy) - 1e-9)
    return [sorted(group) for group in (ranked[high:], ranked[:high]) if group]


def espo_loss(
    logprob: Tensor, old: Tensor, entropy: Tensor, batch: dict[str, Tensor], denominator: str = "self"
) -> tuple[Tensor, Tensor]:
    """Eq. 5, token by token; and which tokens were clipped."""
    rows = []
    clipped = torch.zeros(logprob.shape, dtype=torch.bool)
    for i, advantage in enumerate(batch["advantages"].double()):
        n = int(batch["completion_mask"][i].sum())
        groups = groups_of(entropy[i, :n].tolist(), 0.8)
        means = []
        for group in groups:
            s = torch.exp(sum((logprob[i, t] - old[i, t]) for t in group) / len(group)).detach()
            epsilon = ALPHA / math.log(VOCABULARY) * sum(entropy[i, t].item() for t in group) / len(group)
            terms = []
            for t in group:
                base = logprob[i, t].detach() if denominator == "self" else old[i, t]
                ratio = s * torch.exp(logprob[i, t] - base)
                terms.append(torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage))
                clipped[i, t] = (ratio - 1).abs() > epsilon
            means.append(torch.stack(terms).mean())
        rows.append(torch.stack(means).mean())
    return -torch.stack(rows).mean(), clipped


@pytest.mark.parametrize("denominator", ["self", "old"])
def test_value_and_gradient_are_the_papers(denominator: str) -> None:
    batch = with_old_policy(micro_batch(1), model())
    made = trainer(
        **ESPO, espo_denominator=denominator, loss_denominator="all", token_ratio_start=1.0, token_ratio_end=1.0
    )
    value, gradient = loss_and_gradients(made, batch)
    policy = model()
    logprob, entropy = scores(policy, batch)
    loss, clipped = espo_loss(logprob, batch["old_per_token_logps"].double(), entropy.detach(), batch, denominator)
    valid = batch["completion_mask"].bool()
    assert 0 < clipped.sum() < valid.sum()
    steps = made.current_gradient_accumulation_steps
    (loss / steps).backward()
    made.model = policy
    assert value == pytest.approx(loss.item() / steps, rel=1e-4)
    torch.testing.assert_close(gradient, gradients(made), rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_gradient_flows_through_the_kept_tokens(denominator: str) -> None:
    """Ratios, groups and ranges are those of all tokens."""
    batch = with_old_policy(micro_batch(2), model())
    kept, mask = chosen(batch), batch["completion_mask"]
    value, gradient = loss_and_gradients(trainer(**ESPO, loss_denominator=denominator), batch)
    made = trainer(PlainTrainer)
    logprob, entropy = scores(made.model, batch)
    leaf = logprob.detach().requires_grad_()
    loss, _ = espo_loss(leaf, batch["old_per_token_logps"].double(), entropy.detach(), batch)
    (of_token,) = torch.autograd.grad(loss / made.current_gradient_accumulation_steps, leaf)
    weight = mask.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1) if denominator == "kept" else 1.0
    logprob.backward(torch.where(kept, of_token * weight, 0.0))
    assert value == pytest.approx(loss.item() / made.current_gradient_accumulation_steps, rel=1e-4)
    torch.testing.assert_close(gradient, gradients(made), rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


def test_the_old_policys_entropy_where_there_is_one() -> None:
    batch = with_old_policy(micro_batch(3), model())
    old_entropy = torch.rand(batch["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(1))
    everything = {"token_ratio_start": 1.0, "token_ratio_end": 1.0, "loss_denominator": "all"}
    value, _ = loss_and_gradients(trainer(**ESPO, **everything), batch | {"d3s_entropy": old_entropy})
    logprob, entropy = (score.detach() for score in scores(model(), batch))
    old = batch["old_per_token_logps"].double()
    expected, others = (espo_loss(logprob, old, of, batch)[0].item() for of in (old_entropy.double(), entropy))
    steps = trainer(**ESPO).current_gradient_accumulation_steps
    assert value == pytest.approx(expected / steps, rel=1e-4)
    assert abs(expected - others) > 1e-3


@pytest.mark.parametrize("loss", ["bnpo", "dr_grpo", "dapo"])
def test_losses_over_all_tokens_count_every_token_alike(loss: str) -> None:
    """One group of all tokens, and a wide range: GSPO's ratio at every token, as TRL has it for whole sequences."""
    batch = with_old_policy(micro_batch(4), model())
    everything = {"token_ratio_start": 1.0, "token_ratio_end": 1.0, "loss_denominator": "all", "espo_quantiles": []}
    options = {**ESPO, **everything, "loss_type": loss, "espo_alpha": 1e6}
    value, gradient = loss_and_gradients(trainer(**options), batch)
    plain = trainer(PlainTrainer, loss_type=loss, importance_sampling_level="sequence", epsilon=1e3)
    expected, expected_gradient = loss_and_gradients(plain, batch)
    assert value == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


def test_clip_metrics_are_of_the_tokens_own_ranges() -> None:
    batch = with_old_policy(micro_batch(5), model())
    made = trainer(**ESPO, token_ratio_start=1.0, token_ratio_end=1.0)
    loss_and_gradients(made, batch)
    logprob, entropy = (score.detach() for score in scores(model(), batch))
    logged = made._metrics["train"]
    clipped = espo_loss(logprob, batch["old_per_token_logps"].double(), entropy, batch)[1]
    assert 0 < logged["clip_ratio/region_mean"][0] <= clipped.sum() / batch["completion_mask"].sum()
    assert (made.epsilon_low, made.epsilon_high) == (made.args.epsilon, made.args.epsilon)


def test_a_batch_is_used_again_as_it_was() -> None:
    batch = with_old_policy(micro_batch(6), model())
    before = dict(batch)
    made = trainer(**ESPO)
    first = loss_and_gradients(made, batch)
    assert batch.keys() == before.keys()
    assert all(batch[name] is before[name] for name in batch)
    second = loss_and_gradients(made, batch)
    assert second[0] == first[0]
    assert torch.equal(second[1], first[1])


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2},
        {"num_iterations": 2, "entropy_from": "update", "loss_type": "dapo"},
        {"steps_per_generation": 4, "espo_quantiles": [0.5, 0.9], "espo_denominator": "old"},
        {},
    ],
    ids=lambda options: " ".join(options),
)
def test_trains(options: dict[str, Any]) -> None:
    trained(**{**ESPO, "espo_alpha": 1.0, **options})  # the paper's 0.02 would clip every token of so large a step
