"""The recipe for OpenRLHF, called as OpenRLHF calls it. It needs a GPU to be installed, so that the class which the
recipe inherits is a stand-in.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_core import recipe as load
from torch import Tensor

from d3s_kernels import reference

GROUPS, GROUP = 4, 6


class RayActorGroup:
    """Takes what ``openrlhf/trainer/ray/launcher.py`` takes at 3c3be62, 2026-08-13; returns what it would hand out."""

    def __init__(self, num_nodes: int, num_gpus_per_node: int, ray_actor_type: type, **others: Any) -> None:
        self.actors = [ray_actor_type() for _ in range(num_nodes * num_gpus_per_node)]

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        return method_name, kwargs


recipe = load("d3s_openrlhf", {"openrlhf.trainer.ray.launcher": SimpleNamespace(RayActorGroup=RayActorGroup)})


def arguments(*options: str, **changed: Any) -> Any:
    """OpenRLHF's arguments of a command line with these options. A name with dots is in sections."""
    parser = ArgumentParser()
    given = {
        "algo.advantage.estimator": "group_norm", "train.dynamic_batch_enable": False, "train.batch_size": 4,
        "rollout.batch_size": GROUPS, "rollout.micro_batch_size": 1, "rollout.n_samples_per_prompt": GROUP,
        "actor.num_nodes": 1, "actor.num_gpus_per_node": 4, "ds.ring_attn_size": 2, "ds.tensor_parallel_size": 1,
    }  # fmt: skip
    parser.add_argument("--actor.optim")
    parser.set_defaults(**given | changed)
    with pytest.MonkeyPatch.context() as patch:
        own = ["--d3s.rollouts_start", "2", "--d3s.rollouts_end=2", *options]
        patch.setattr(sys, "argv", ["train.py", *own, "--actor.optim", "adam"])
        flat = vars(recipe.parse_args(parser))
    args = SimpleNamespace()
    for path, value in flat.items():
        node, *names = args, *path.split(".")
        for name in names[:-1]:
            node = vars(node).setdefault(name, SimpleNamespace())
        setattr(node, names[-1], value)
    assert args.actor.optim == "adam"
    return args


def handed(args: Any, rewards: Tensor) -> list[bool]:
    """Which experiences actors hand out for the update."""
    actors = recipe.D3SActorGroup(args, 1, 4, SimpleNamespace, pg=None)
    given = [SimpleNamespace(rewards=reward.view(1)) for reward in rewards.flatten()]
    assert actors.async_run_method_batch("forward", sequences=given) == ("forward", {"sequences": given})
    method, values = actors.async_run_method_batch(method_name="append", experience=given)
    assert (method, list(values)) == ("append", ["experience"])
    kept = [any(one is other for other in values["experience"]) for one in given]
    assert values["experience"] == [one for one, keep in zip(given, kept, strict=True) if keep]
    return kept


@pytest.mark.parametrize(
    ("estimator", "scale", "scope"), [("group_norm", "group", "batch"), ("dr_grpo", "none", "group")]
)
def test_actors_get_the_kept_rollouts_for_the_update(estimator: str, scale: str, scope: str) -> None:
    """A pass before the update is on all rollouts."""
    args = arguments(f"--d3s.rollout_scope={scope}", **{"algo.advantage.estimator": estimator})
    rewards = torch.randn(GROUPS, GROUP) * 10.0 ** torch.arange(GROUPS).unsqueeze(1)
    kept = reference.select_rollouts(reference.group_advantages(rewards, scale=scale), 2, scope=scope)
    assert handed(args, rewards) == kept.flatten().tolist()


@pytest.mark.parametrize(("ring", "number"), [(1, 8), (2, 6)])
def test_the_number_of_rollouts_is_a_multiple_of_the_ranks(ring: int, number: int) -> None:
    """The last batch of an epoch may have fewer prompts: of 3, with 2 rollouts each, 6 are kept, or 8 on 4 ranks."""
    assert sum(handed(arguments(**{"ds.ring_attn_size": ring}), torch.randn(3, GROUP))) == number


OF_4_RANKS = {"rollout.batch_size": 3, "ds.ring_attn_size": 1, "train.batch_size": 6}  # 6 are kept, rounded up to 8


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        (["--d3s.token_rule=entropy"], {}, r"--d3s\.token_rule: got 'entropy', but only rollouts are chosen"),
        (["--d3s.rollouts_end=3"], {}, r"--d3s\.rollouts_end: got 3 with --d3s\.rollouts_start 2; takes 2, because"),
        ([], {"algo.advantage.estimator": "gae"}, r"algo\.advantage\.estimator: got 'gae'; takes 'group_norm' or "),
        ([], {"train.dynamic_batch_enable": True}, r"train\.dynamic_batch_enable: got True; takes False"),
        ([], {"rollout.micro_batch_size": 2}, r"rollout\.micro_batch_size: got 2; takes 1"),
        ([], OF_4_RANKS, r"train\.batch_size: got 6, but 8 rollouts are kept; takes a divisor of 8"),
    ],
)
def test_what_openrlhf_cannot_follow_is_refused(options: list[str], changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.selection_of(arguments(*options, **changed))
