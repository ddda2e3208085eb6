"""TRL's own advantages and quantiles of entropies, compared with those of our ops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from tiny_trl import GROUP, PlainTrainer, trainer
from trl import GRPOTrainer

from d3s_kernels import group_advantages, select_tokens


@pytest.fixture(scope="module")
def plain() -> GRPOTrainer:
    return trainer(PlainTrainer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5, 0.99])
def test_the_quantile_of_entropies(plain: GRPOTrainer, ratio: float, dtype: torch.dtype) -> None:
    """The masks are equal, also for entropies that tie, for NaN, and for no tokens."""
    mask = torch.rand(7, 90) < 0.8
    for entropy in (torch.rand(7, 90), torch.randint(4, (7, 90)) / 3, torch.full((7, 90), 0.5)):
        for values, present in ((entropy, mask), (entropy, ~mask), (entropy, torch.zeros_like(mask))):
            values = values.to(dtype)
            theirs = plain.get_high_entropy_mask(values, present.int(), 1 - ratio)
            ours = select_tokens(values, None, ratio, rule="entropy_quantile", mask=present)
            assert ours.mask.equal(theirs)
            assert ours.count == theirs.sum()
    entropy[mask] = math.nan
    assert not plain.get_high_entropy_mask(entropy, mask.int(), 1 - ratio).any()
    assert not select_tokens(entropy, None, ratio, rule="entropy_quantile", mask=mask).mask.any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_with_completions_that_no_reward_scored(scale: str) -> None:
    """TRL leaves a reward of None out of mean and deviation, and gives it the advantage 0."""
    rewards = torch.randint(9, (4, GROUP)) / 8
    rewards[torch.rand(4, GROUP) < 0.3] = math.nan
    rewards[0], rewards[1, 1:] = 0.25, math.nan  # a group of equal rewards; a group with one score

    def score(completion_ids: Any, **_: Any) -> list[float | None]:
        return [None if math.isnan(r) else r for r in rewards.flatten().tolist()]

    made = trainer(PlainTrainer, reward_funcs=score, scale_rewards=scale)
    inputs = [{"prompt": f"w{i} w7"} for i in range(2, 6) for _ in range(GROUP)]
    theirs = made._generate_and_score_completions(inputs)["advantages"]
    torch.testing.assert_close(group_advantages(rewards, scale=scale).flatten(), theirs, rtol=1e-4, atol=1e-5)
