"""Every rule keeps what the library's functions keep; advantages and quantiles of entropies are TRL's own."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("trl")
from batches import generation_batch
from tiny_trl import GROUP, PlainTrainer, generated, trainer
from trl import GRPOTrainer

from d3s_kernels import group_advantages, select_rollouts, select_tokens
from d3s_kernels.rollouts.select_rollouts import RolloutRule
from d3s_kernels.selection import choose_rollouts


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
    theirs = generated(made, range(2, 6))["advantages"]
    torch.testing.assert_close(group_advantages(rewards, scale=scale).flatten(), theirs, rtol=1e-4, atol=1e-5)


# ---- the options -----------------------------------------------------------------------------------------------------


def test_random_rollouts_are_the_same_on_every_process_and_others_each_time() -> None:
    def drawn(seed_of_process: int, step: int = 0) -> list[list[float]]:
        made = trainer(rollout_rule="random")
        made.state.global_step = step
        torch.manual_seed(seed_of_process)
        return [made._keep_rollouts(generation_batch(5))["advantages"].tolist() for _ in range(2)]

    first, second = drawn(1)
    assert first != second  # two generations within a step
    assert drawn(2) == [first, second] != drawn(1, step=1)


@pytest.mark.parametrize("rule", get_args(RolloutRule))
def test_rollouts_that_cannot_move_are_chosen_by_each_rule(rule: RolloutRule) -> None:
    """Three groups on two processes, of which each keeps half of its own rollouts."""
    values, draws = torch.randn(3, GROUP), torch.Generator() if rule == "random" else None
    kept = choose_rollouts(values, 4, multiple_of=2, rule=rule, ranks=2, generator=draws).view(2, -1)
    assert kept.sum(dim=1).tolist() == [6, 6]
    if rule not in ("max_variance", "random"):
        assert torch.equal(kept, select_rollouts(values.view(2, -1), 6, rule=rule, scope="group"))


def test_groups_that_differ_by_rounding_alone_are_counted() -> None:
    """A reward function adds the same three numbers, in one order or in the other. Two others cancel each other."""
    a, b, c = torch.tensor([0.1, 0.2, 0.35])
    sums = [float(a + b + c), float(c + b + a)]
    assert sums[0] != sums[1]
    made = trainer(reward_funcs=lambda completion_ids, **_: [sums[i % 2] for i in range(len(completion_ids))])
    generated(made)
    logged = made._metrics["train"]
    assert float(logged["d3s/groups_without_spread"][0]) == 1 > logged["frac_reward_zero_std"][0]
    two = [lambda completion_ids, **_: [float(i % 2) for i in range(len(completion_ids))]]
    two.append(lambda completion_ids, **_: [float(1 - i % 2) for i in range(len(completion_ids))])
    for aggregation, without in (("sum_then_normalize", 1), ("normalize_then_sum", 0)):
        made = trainer(reward_funcs=two, multi_objective_aggregation=aggregation)
        generated(made)
        assert float(made._metrics["train"]["d3s/groups_without_spread"][0]) == without
