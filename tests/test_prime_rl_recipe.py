"""The recipe for prime-rl, called as prime-rl calls it. It needs a GPU to be installed, so that what the recipe imports
of it is a stand-in.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from d3s_kernels import reference

RECIPE = Path(__file__).parents[1] / "examples" / "trainers" / "d3s_prime_rl.py"
OPTIONS = {"rollouts_start": 3, "rollouts_end": 3, "rollout_scope": "group"}

# ---- the stand-in: written from src/prime_rl/orchestrator/ of prime-rl at 559b447, 2026-08-21 ------------------------


def iter_trainable_traces(episodes: list[Any]) -> Iterator[tuple[Any, Any]]:
    """algo/base.py: each trace without an error, of an agent that is trained, with a sampled token."""
    for episode in episodes:
        usable = [trace for trace in episode.traces if trace.agent.trainable and not trace.has_error]
        yield from ((episode, trace) for trace in usable if sum(sum(node.mask) for node in trace.nodes))


def assign_advantages(trace: Any, values: float) -> None:
    """algo/routing.py: a number for each sampled token of each node that has one; the other nodes stay as they are."""
    assert isinstance(values, float)
    for node in trace.nodes:
        if sum(node.mask):
            node.advantages = [values] * sum(node.mask)


class GRPOAlgorithm:
    """algo/grpo.py: rewards minus their mean, in float32."""

    def __init__(self, config: Any, policy_pool: Any) -> None:
        self.length_penalty, self.policy_pool = config.length_penalty, policy_pool

    async def score_group(self, episodes: list[Any]) -> None:
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        for trace, advantage in zip(traces, centred([trace.reward for trace in traces]), strict=True):
            assign_advantages(trace, advantage)


def train_work(episode: Any) -> Any:
    """utils.py: what an episode was generated for, and with which versions of the policy."""
    return episode.run.work


def centred(rewards: list[float]) -> list[float]:
    values = torch.tensor(rewards)
    return (values - values.mean()).tolist()


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = {
        "": {}, ".orchestrator": {}, ".orchestrator.algo": {},
        ".orchestrator.algo.base": {"iter_trainable_traces": iter_trainable_traces},
        ".orchestrator.algo.grpo": {"GRPOAlgorithm": GRPOAlgorithm},
        ".orchestrator.algo.routing": {"assign_advantages": assign_advantages},
        ".orchestrator.utils": {"train_work": train_work},
    }  # fmt: skip
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, f"prime_rl{name}", stand_in := ModuleType(f"prime_rl{name}"))
        vars(stand_in).update(contents)
    spec = importlib.util.spec_from_file_location("d3s_prime_rl", RECIPE)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as without:  # prime-rl imports algorithms in processes without torch, too
        without.setitem(sys.modules, "torch", None)
        without.setitem(sys.modules, "d3s_kernels", None)
        spec.loader.exec_module(module)
    return module


# ---- the tests -------------------------------------------------------------------------------------------------------


def group_of(rewards: Tensor, version: int = 0) -> list[Any]:
    """An episode for each reward: its trace has a prompt and two turns. One more has an error, and one has no token."""

    def episode(reward: float, nodes: tuple[Any, ...], has_error: bool = False) -> Any:
        agent = SimpleNamespace(trainable=True)
        trace = SimpleNamespace(agent=agent, has_error=has_error, reward=reward, nodes=list(nodes))
        work = SimpleNamespace(policy=SimpleNamespace(start=version, end=version + 1))
        return SimpleNamespace(traces=[trace], run=SimpleNamespace(work=work))

    def node(mask: list[bool]) -> Any:
        return SimpleNamespace(mask=mask, token_ids=[7] * len(mask), advantages=None)

    def turns() -> tuple[Any, ...]:
        return node([False] * 4), node([False, True, True, True]), node([True, True])

    whole = [episode(reward, turns()) for reward in rewards.tolist()]
    return [episode(99.0, turns(), has_error=True), *whole, episode(-99.0, (node([False] * 2),))]


def score(recipe: Any, episodes: list[Any], steps: int | None = None, **options: Any) -> list[float]:
    """What the tokens of each trace are trained with."""
    config = SimpleNamespace(length_penalty=None, steps=steps, selection=OPTIONS | options)
    asyncio.run(recipe.D3SAlgorithm(config, "its pool").score_group(episodes))
    broken, *whole, empty = (episode.traces[0] for episode in episodes)
    assert all(node.advantages is None for trace in (broken, empty) for node in trace.nodes)
    values = [trace.nodes[2].advantages[0] for trace in whole]
    for trace, value in zip(whole, values, strict=True):
        assert [node.advantages for node in trace.nodes] == [None, [value] * 3, [value] * 2]
    return values


def test_kept_rollouts_have_the_advantages_of_the_whole_group_or_of_the_kept_ones(recipe: Any) -> None:
    rewards = torch.randn(8)
    values = score(recipe, group_of(rewards))
    advantages = centred(rewards.tolist())
    kept = reference.select_rollouts(torch.tensor([advantages]), 3, scope="group")[0].tolist()
    assert values == [advantage if keep else 0.0 for advantage, keep in zip(advantages, kept, strict=True)]
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    values = score(recipe, group_of(rewards), advantages_from="kept", rollout_rule="highest")
    assert values[:3] == [0.0] * 3
    assert values[3:] == pytest.approx([3 - 16 / 3, 4 - 16 / 3, 9 - 16 / 3])
    assert score(recipe, group_of(torch.full((5,), 0.5))) == [0.0] * 5, "a group without a spread gives nothing"


def test_the_number_of_rollouts_follows_the_version_of_the_policy(recipe: Any) -> None:
    for version, number in ((0, 2), (5, 5), (10, 8), (12, 8)):
        values = score(recipe, group_of(torch.randn(8), version), steps=10, rollouts_start=0.25, rollouts_end=1.0)
        assert sum(value != 0 for value in values) == number


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"rollouts": 3}, None, r"^algo\.selection\.rollouts: got 3, but only rollouts are chosen in prime-rl; takes "),
        ({"token_ratio_start": 0.1}, None, r"^algo\.selection\.token_ratio_start: got 0\.1, but only rollouts are"),
        ({"rollouts_start": 1.5}, None, r"^algo\.selection\.rollouts_start: got 1\.5; takes a share"),
        ({"rollout_scope": "batch"}, None, r"^algo\.selection\.rollout_scope: got 'batch'; takes 'group', because"),
        ({"rollouts_end": 5}, None, r"rollouts_end: got 5 with rollouts_start 3 and no algo\.steps; takes 3, or"),
        ({"rollouts_end": 5}, 0, r"^algo\.steps: got 0; takes a number of steps, at least 1"),
    ],
)
def test_options_that_prime_rl_cannot_follow_are_refused(
    recipe: Any, options: dict[str, Any], steps: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        score(recipe, [], steps, **options)
