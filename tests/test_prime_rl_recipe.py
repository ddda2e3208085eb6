"""The recipe for prime-rl, called as prime-rl calls it. It needs a GPU to be installed, so that what the recipe imports
of it is a stand-in.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_core import recipe as load
from torch import Tensor

from d3s_kernels import reference

# ---- the stand-in: written from src/prime_rl/orchestrator/ of prime-rl at 559b447, 2026-08-21 ------------------------


def iter_trainable_traces(episodes: list[Any]) -> list[tuple[Any, Any]]:
    """algo/base.py: each trace without an error, of an agent that is trained, with a sampled token."""
    return [(episode, trace) for episode in episodes for trace in episode.traces if not trace.has_error]


def assign_advantages(trace: Any, values: float) -> None:
    """algo/routing.py: a number for each sampled token of each node that has one; the other nodes stay as they are."""
    assert isinstance(values, float)
    for node in trace.nodes:
        if sum(node.mask):
            node.advantages = [values] * sum(node.mask)


class GRPOAlgorithm:
    """algo/grpo.py: rewards minus their mean, in float32."""

    def __init__(self, config: Any, policy_pool: Any) -> None:
        pass

    async def score_group(self, episodes: list[Any]) -> None:
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        for trace, advantage in zip(traces, centred([trace.reward for trace in traces]), strict=True):
            assign_advantages(trace, advantage)


def centred(rewards: list[float]) -> list[float]:
    values = torch.tensor(rewards)
    return (values - values.mean()).tolist()


ORCHESTRATOR = {
    "algo.base": SimpleNamespace(iter_trainable_traces=iter_trainable_traces),
    "algo.grpo": SimpleNamespace(GRPOAlgorithm=GRPOAlgorithm),
    "algo.routing": SimpleNamespace(assign_advantages=assign_advantages),
    "utils": SimpleNamespace(train_work=lambda episode: episode.run.work),
}
# prime-rl imports algorithms in processes without torch, too.
WITHOUT = {"torch": None, "d3s_kernels": None}
recipe = load("d3s_prime_rl", WITHOUT | {f"prime_rl.orchestrator.{name}": of for name, of in ORCHESTRATOR.items()})


# ---- the tests -------------------------------------------------------------------------------------------------------


def score(rewards: Tensor, version: int = 0, steps: int | None = None, **options: Any) -> list[float]:
    """What the tokens of each rollout are trained with. It has a prompt and two turns; one more has an error."""

    def episode(reward: float, has_error: bool = False) -> Any:
        masks = [False] * 4, [False, True, True, True], [True, True]
        nodes = [SimpleNamespace(mask=mask, advantages=None) for mask in masks]
        work = SimpleNamespace(policy=SimpleNamespace(start=version, end=version + 1))
        trace = SimpleNamespace(has_error=has_error, reward=reward, nodes=nodes)
        return SimpleNamespace(traces=[trace], run=SimpleNamespace(work=work))

    selection = {"rollouts_start": 3, "rollouts_end": 3, "rollout_scope": "group", **options}
    episodes = [episode(99.0, has_error=True), *map(episode, rewards.tolist())]
    algorithm = recipe.D3SAlgorithm(SimpleNamespace(steps=steps, selection=selection), "its pool")
    asyncio.run(algorithm.score_group(episodes))
    broken, *whole = (episode.traces[0] for episode in episodes)
    assert all(node.advantages is None for node in broken.nodes)
    values = [trace.nodes[2].advantages[0] for trace in whole]
    for trace, value in zip(whole, values, strict=True):
        assert [node.advantages for node in trace.nodes] == [None, [value] * 3, [value] * 2]
    return values


def test_kept_rollouts_have_the_advantages_of_the_whole_group_or_of_the_kept_ones() -> None:
    rewards = torch.randn(8)
    advantages = centred(rewards.tolist())
    kept = reference.select_rollouts(torch.tensor([advantages]), 3, scope="group")[0].tolist()
    assert score(rewards) == [advantage if keep else 0.0 for advantage, keep in zip(advantages, kept, strict=True)]
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    values = score(rewards, advantages_from="kept", rollout_rule="highest")
    assert values == pytest.approx([0.0, 0.0, 0.0, 3 - 16 / 3, 4 - 16 / 3, 9 - 16 / 3])
    assert score(torch.full((5,), 0.5)) == [0.0] * 5, "a group without a spread gives nothing"


def test_the_number_of_rollouts_follows_the_version_of_the_policy() -> None:
    for version, number in ((0, 2), (5, 5), (10, 8), (12, 8)):
        values = score(torch.randn(8), version, steps=10, rollouts_start=0.25, rollouts_end=1.0)
        assert sum(value != 0 for value in values) == number


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"token_ratio_start": 0.1}, None, r"^algo\.selection\.token_ratio_start: got 0\.1, but only rollouts are"),
        ({"rollout_scope": "batch"}, None, r"^algo\.selection\.rollout_scope: got 'batch'; takes 'group', because"),
        ({"rollouts_end": 5}, None, r"rollouts_end: got 5 with rollouts_start 3 and no algo\.steps; takes 3, or"),
        ({"rollouts_end": 5}, 0, r"^algo\.steps: got 0; takes a number of steps, at least 1"),
    ],
)
def test_what_prime_rl_cannot_follow_is_refused(options: dict[str, Any], steps: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(torch.randn(8), 0, steps, **options)
