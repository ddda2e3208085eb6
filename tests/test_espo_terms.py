"""espo_terms: the terms of ESPO for a trainer's loss, against the paper's formulas in a plain loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import groups_of
from torch import Tensor

from d3s_kernels.off_policy.importance_ratio import espo_terms

VOCAB_SIZE = 1000


def sample(rows: int = 5, length: int = 17) -> dict[str, Any]:
    """A policy that has moved a little; completions of several lengths, one of a single token, one empty."""
    old = -3 * torch.rand(rows, length)
    lengths = torch.tensor([length, 1, 0, *torch.randint(2, length, (rows - 3,)).tolist()])
    return {
        "logprob": old + 0.05 * torch.randn(rows, length),
        "old_logprob": old,
        "entropy": torch.rand(rows, length) * 2,
        "mask": torch.arange(length) < lengths.unsqueeze(-1),
        "vocab_size": VOCAB_SIZE,
    }


def surrogate(ratio: Tensor, epsilon: Tensor | float, advantage: Tensor) -> Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)


def objective_in_a_loop(batch: dict[str, Any], advantages: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """Eq. 5 with eq. 8 to 10 in float64, with the group's own ratio. The tokens share its gradient equally."""
    sequences = []
    for row, advantage in enumerate(advantages):
        logprob, old = batch["logprob"][row].double(), batch["old_logprob"][row].double()
        entropy, mask = batch["entropy"][row], batch["mask"][row]
        means = []
        for members in groups_of(entropy, mask, quantiles):
            ratio = torch.exp(sum(logprob[t] - old[t] for t in members) / len(members))
            epsilon = 0.02 / math.log(VOCAB_SIZE) * sum(float(entropy[t]) for t in members) / len(members)
            if (
                abs(abs(float(ratio.detach()) - 1) - epsilon) < 1e-6
            ):  # within rounding of its bound either side may be taken
                pytest.skip("a ratio lies at its bound")
            means.append(sum(surrogate(ratio, epsilon, advantage) for _ in members) / len(members))
        if means:
            sequences.append(sum(means) / len(means))
    return sum(sequences) / len(sequences)


def objective(batch: dict[str, Any], advantages: Tensor, **changed: Any) -> Tensor:
    """The loss as a trainer computes it: the mean over sequences of the mean over tokens."""
    ratio, epsilon, weight = espo_terms(**batch, **changed)
    tokens = weight * surrogate(ratio, epsilon, advantages.unsqueeze(-1))
    lengths = batch["mask"].sum(-1)
    return (tokens.sum(-1) / lengths)[lengths > 0].mean()


@pytest.mark.parametrize("quantiles", [(), (0.8,), (0.5,), (0.3, 0.6, 0.9), (0.01, 0.02)])
def test_the_papers_objective_and_its_gradient(quantiles: tuple[float, ...]) -> None:
    batch, advantages = sample(), torch.randn(5)
    leaf = batch["logprob"].requires_grad_()
    expected = objective_in_a_loop(batch, advantages, quantiles)
    actual = objective(batch, advantages, quantiles=quantiles)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    (gradient,) = torch.autograd.grad(actual, leaf)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-7)


def test_the_printed_denominator() -> None:
    """Eq. 9 as it is printed: the group's ratio times the token's own."""
    batch = sample()
    own = espo_terms(**batch)
    printed = espo_terms(**batch, denominator="old")
    token = torch.exp(batch["logprob"] - batch["old_logprob"])
    torch.testing.assert_close(printed.ratio, torch.where(batch["mask"], own.ratio * token, 1.0))
    assert torch.equal(printed.epsilon, own.epsilon)


def test_a_token_outside_of_all_groups() -> None:
    """Padding and a token whose entropy is NaN have no group: the means of a sequence leave them out."""
    batch = sample()
    batch["logprob"].requires_grad_()
    batch["entropy"][0, 3] = math.nan
    outside = ~batch["mask"]
    outside[0, 3] = True
    terms = espo_terms(**batch)
    assert (terms.ratio[outside] == 1).all()
    assert not terms.epsilon[outside].any()
    assert not terms.weight[outside].any()
    (gradient,) = torch.autograd.grad(terms.ratio.sum(), batch["logprob"])
    assert torch.equal(gradient != 0, ~outside)
    lengths = batch["mask"].sum(-1)
    torch.testing.assert_close(terms.weight.sum(-1), lengths.float())


def test_weights_are_plain_where_there_is_one_group() -> None:
    batch = sample()
    assert torch.equal(espo_terms(**batch, quantiles=()).weight, batch["mask"].float())
