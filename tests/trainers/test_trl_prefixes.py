"""Sequences that are cut at random: the mean of the gradients over all cuts is GRPOTrainer's gradient."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import slow
from torch import Tensor

pytest.importorskip("trl")
from batches import forwards
from test_trl_micro_batches import Steps, rollouts
from tiny_trl import EOS, GROUP, PlainTrainer, trainer
from trl import GRPOTrainer

from d3s_kernels.integrations.trl import D3STrainer

PREFIX: dict[str, Any] = {"token_rule": "prefix", "token_ratio_start": 0.5, "token_ratio_end": 0.5, "rollouts": 1.0}
WHOLE = {"token_ratio_start": 1.0, "token_ratio_end": 1.0}


def run(kind: type[GRPOTrainer], make_rollouts: Any = rollouts, **options: Any) -> tuple[Any, list[Tensor], list[Any]]:
    """A trainer after its run, the gradient of each optimizer step, and the shapes of all forwards."""
    given = {"gradient_accumulation_steps": 4, "max_steps": 1, "max_completion_length": 24, "max_grad_norm": 0.0}
    made = trainer(kind, optim="sgd", learning_rate=0.0, **given | options)
    made.rollout_func = make_rollouts
    made.add_callback(steps := Steps())
    torch.manual_seed(3)
    with forwards(made.model) as seen:
        made.train()
    return made, steps.gradients, [(grad, list(each["input_ids"].shape)) for grad, each in seen]


def two_short_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = [[4, 9, EOS], [7, 5, 12, EOS]]
    return {"prompt_ids": [[3, 8]] * 2, "completion_ids": ids, "logprobs": None}


@pytest.mark.parametrize("options", [{"loss_type": "grpo"}, slow({"loss_type": "dapo", "beta": 0.2}, shows="KL too")])
def test_the_mean_over_all_cuts_is_the_gradient_of_all_tokens(
    options: dict[str, Any], saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    sizes |= {"policy": saved, "reward_funcs": lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]}
    _, (expected,), _ = run(PlainTrainer, two_short_rollouts, **sizes, **options)
    found = []
    for first, second in product(range(3), range(4)):
        draws = torch.tensor([(first + 0.5) / 3, (second + 0.5) / 4], dtype=torch.float64)
        monkeypatch.setattr(D3STrainer, "_draws_of_rollouts", lambda *_, draws=draws: draws)
        found += run(D3STrainer, two_short_rollouts, **PREFIX, **sizes, **options)[1]
    assert len({float(each.norm()) for each in found}) == 12
    mean = torch.stack(found).mean(0)
    assert float((mean - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_espo_groups_tokens_by_entropies_that_no_choice_reads(num_iterations: int) -> None:
    """With cuts behind the last tokens."""
    espo = {"importance_sampling_level": "entropy_group", "loss_type": "grpo", "num_iterations": num_iterations}
    found = [
        run(D3STrainer, **PREFIX | espo | {"token_rule": rule, "loss_denominator": "all"} | WHOLE)[1][0]
        for rule in ("prefix", "advantage_entropy")
    ]
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-5


def test_rows_without_an_advantage_are_not_forwarded_with_drop_zeros() -> None:
    def equal_but_two(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0] * (len(completion_ids) - GROUP) + [float(len(ids)) for ids in completion_ids[-GROUP:]]

    options = PREFIX | {"drop_zeros": True, "reward_funcs": equal_but_two, "gradient_accumulation_steps": 2}
    _, _, shapes = run(D3STrainer, **options)
    assert sum(rows for has_gradient, (rows, _) in shapes if has_gradient) <= GROUP
