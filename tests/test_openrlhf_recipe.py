"""The recipe for OpenRLHF, called as OpenRLHF calls it. It needs a GPU to be installed, so that the class which the
recipe inherits is a stand-in.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_core import installed
from torch import Tensor

from d3s_kernels import reference

RECIPE = Path(__file__).parents[1] / "examples" / "trainers" / "d3s_openrlhf.py"
GROUPS, GROUP = 4, 6
OPTIONS = ["--d3s.rollouts_start", "2", "--d3s.rollouts_end=2"]


class RayActorGroup:
    """Takes what ``openrlhf/trainer/ray/launcher.py`` takes at 3c3be62, 2026-08-13; returns what it would hand out."""

    def __init__(self, num_nodes: int, num_gpus_per_node: int, ray_actor_type: type, **others: Any) -> None:
        self.actors = [ray_actor_type() for _ in range(num_nodes * num_gpus_per_node)]

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        return method_name, kwargs


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("d3s_openrlhf", RECIPE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "d3s_openrlhf", module)  # pickle finds the class there
    names = ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher")
    with installed({name: ModuleType(name) for name in names}):
        sys.modules[names[-1]].RayActorGroup = RayActorGroup  # type: ignore[attr-defined]
        spec.loader.exec_module(module)
    return module


def nested(values: dict[str, Any]) -> SimpleNamespace:
    """As OpenRLHF's ``hierarchize``: a name with dots is in sections."""
    root = SimpleNamespace()
    for path, value in values.items():
        node, *names = root, *path.split(".")
        for name in names[:-1]:
            vars(node).setdefault(name, SimpleNamespace())
            node = getattr(node, name)
        setattr(node, names[-1], value)
    return root


def arguments(recipe: Any, *options: str, **changed: Any) -> Any:
    """OpenRLHF's arguments of a command line with these options."""
    parser = ArgumentParser()
    given = {
        "algo.advantage.estimator": "group_norm", "train.dynamic_batch_enable": False, "train.batch_size": 4,
        "rollout.batch_size": GROUPS, "rollout.micro_batch_size": 1, "rollout.n_samples_per_prompt": GROUP,
        "actor.num_nodes": 1, "actor.num_gpus_per_node": 4, "ds.ring_attn_size": 2, "ds.tensor_parallel_size": 1,
    }  # fmt: skip
    parser.add_argument("--actor.optim")
    parser.add_argument("--use_ms", action="store_true")
    parser.set_defaults(**given | changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--actor.optim", "adam", *OPTIONS, *options, "--use_ms"])
        args = nested(vars(recipe.parse_args(parser)))
    assert (args.actor.optim, args.use_ms) == ("adam", True)
    return args


def handed(recipe: Any, args: Any, rewards: Tensor) -> tuple[list[Any], list[Any]]:
    """All experiences, and those that actors in another process hand out for the update."""
    actors = pickle.loads(pickle.dumps(recipe.D3SActorGroup(args, 1, 4, SimpleNamespace, pg=None)))
    given = [SimpleNamespace(rewards=reward.view(1)) for reward in rewards.flatten()]
    method, values = actors.async_run_method_batch(method_name="append", experience=list(given))
    assert (method, list(values)) == ("append", ["experience"])
    everything = list(range(24))  # a pass before the update is on all rollouts
    assert actors.async_run_method_batch("forward", sequences=everything) == ("forward", {"sequences": everything})
    return given, values["experience"]


@pytest.mark.parametrize(("estimator", "scale"), [("group_norm", "group"), ("dr_grpo", "none")])
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_actors_get_the_kept_rollouts_for_the_update(recipe: Any, estimator: str, scale: str, scope: str) -> None:
    args = arguments(recipe, f"--d3s.rollout_scope={scope}", **{"algo.advantage.estimator": estimator})
    rewards = torch.randn(GROUPS, GROUP) * 10.0 ** torch.arange(GROUPS).unsqueeze(1)
    given, kept = handed(recipe, args, rewards)
    chosen = reference.select_rollouts(reference.group_advantages(rewards, scale=scale), 2, scope=scope).flatten()
    assert kept == [one for one, keep in zip(given, chosen.tolist(), strict=True) if keep]


@pytest.mark.parametrize(("ring", "number"), [(1, 8), (2, 6)])
def test_the_number_of_rollouts_is_a_multiple_of_the_ranks(recipe: Any, ring: int, number: int) -> None:
    """The last batch of an epoch may have fewer prompts: of 3, with 2 rollouts each, 6 are kept, or 8 on 4 ranks."""
    args = arguments(recipe, **{"ds.ring_attn_size": ring})
    assert len(handed(recipe, args, torch.randn(3, GROUP))[1]) == number


OF_4_RANKS = {"rollout.batch_size": 3, "ds.ring_attn_size": 1, "train.batch_size": 6}  # 6 are kept, rounded up to 8


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        (["--d3s.rollouts_start=1.5"], {}, r"--d3s\.rollouts_start: got 1\.5; takes a share"),
        (["--d3s.rollouts=2"], {}, r"--d3s\.rollouts: got 2, but it is no option; the options are --d3s\.rollouts_s"),
        (["--d3s.rollout_rule"], {}, r"--d3s\.rollout_rule: got '--use_ms'; takes 'max_variance' or"),
        (["--d3s.token_rule=entropy"], {}, r"--d3s\.token_rule: got 'entropy', but only rollouts are chosen"),
        (["--d3s.rollouts_end=3"], {}, r"--d3s\.rollouts_end: got 3 with --d3s\.rollouts_start 2; takes 2, because"),
        ([], {"algo.advantage.estimator": "gae"}, r"algo\.advantage\.estimator: got 'gae'; takes 'group_norm' or "),
        ([], {"train.dynamic_batch_enable": True}, r"train\.dynamic_batch_enable: got True; takes False"),
        ([], {"rollout.micro_batch_size": 2}, r"rollout\.micro_batch_size: got 2; takes 1"),
        ([], {"train.batch_size": 6}, r"train\.batch_size: got 6, but 8 rollouts are kept; takes a divisor of 8"),
        ([], OF_4_RANKS, r"train\.batch_size: got 6, but 8 rollouts are kept"),
    ],
)
def test_options_are_refused_before_an_actor_starts(
    recipe: Any, options: list[str], changed: Any, message: str
) -> None:
    def start() -> None:
        pytest.fail("an actor was started")

    with pytest.raises(ValueError, match=message):
        recipe.D3SActorGroup(arguments(recipe, *options, **changed), 1, 4, start)


def test_without_options_nothing_is_dropped_in_silence(recipe: Any) -> None:
    args = arguments(recipe)
    del args.d3s
    with pytest.raises(ValueError, match=r"--d3s\.rollouts_end: got 1\.0 with --d3s\.rollouts_start 0\.25"):
        recipe.selection_of(args)
