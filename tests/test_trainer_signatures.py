"""Recipes and stand-ins have the parameters of the trainers' functions, which docs/trainers.md lists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_core
import test_nemo_rl_recipe as nemo_rl
import test_openrlhf_recipe as openrlhf
import test_prime_rl_recipe as prime_rl
import test_slime_recipe as slime
import test_trainer_snippets as snippets

PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## What it was tried with")[2]
RECIPE = slime.recipe()
OURS: list[Callable[..., Any]] = [
    RECIPE.keep_rollouts, RECIPE.post_process_rewards, RECIPE.choose_tokens, slime.policy_loss_function,
    nemo_rl.ClippedPGLossFn.__call__, nemo_rl.Policy.train, openrlhf.RayActorGroup.async_run_method_batch,
    snippets.PPOActor.ppo_update, snippets.grpo_loss_fn, prime_rl.GRPOAlgorithm.score_group,
    prime_rl.iter_trainable_traces, prime_rl.assign_advantages, prime_rl.train_work,
    snippets.RayPPOTrainer.compute_advantages_and_returns, snippets.pack_sequences,
    megatron_core.gather_from_sequence_parallel_region,
]  # fmt: skip


def test_stand_ins_have_the_parameters_that_were_read() -> None:
    written = re.findall(r"`([\w.]+)\(([^)]*)\)`", SECTION)
    assert [name for name, _ in written] == [each.__qualname__ for each in OURS]
    for each, (name, parameters) in zip(OURS, written, strict=True):
        signature = inspect.signature(each).parameters.values()
        names = ["**" * (p.kind is p.VAR_KEYWORD) + p.name for p in signature if p.name != "self"]
        read = parameters.split(", ")
        if read[-1] == "...":  # there are more
            read.pop()
            names = names[: len(read)]
        assert names == read, name


def test_the_loss_for_miles_is_called_as_miles_own() -> None:
    losses = slime.policy_loss_function, slime.recipe_for_miles().token_loss
    theirs, ours = (list(inspect.signature(loss).parameters) for loss in losses)
    assert ours == theirs
