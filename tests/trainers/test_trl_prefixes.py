"""Sequences that are cut at random: nothing after a cut is forwarded, and the mean of the gradients over all cuts is
GRPOTrainer's gradient.
"""

from __future__ import annotations

import math
from fractions import Fraction
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

HALF = Fraction(1, 2)
PREFIX: dict[str, Any] = {"token_rule": "prefix", "token_ratio_start": 0.5, "token_ratio_end": 0.5, "rollouts": 1.0}
WHOLE = {"token_ratio_start": 1.0, "token_ratio_end": 1.0}
COMBINED: dict[str, Any] = PREFIX | {"token_rule": "prefix_advantage_entropy"}


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


def least(length: int, ratio: Fraction) -> int:
    return max(1, math.ceil((2 * ratio - 1) * length))


def cuts_of(lengths: list[int], ratio: Fraction = HALF) -> list[int]:
    """Where the rollouts of the first generation batch are cut."""
    draws = torch.rand(
        len(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(42 + 499_979)
    ).tolist()
    return [least(n, ratio) + int(u * (n - least(n, ratio) + 1)) for u, n in zip(draws, lengths, strict=True)]


class Weighted(PlainTrainer):
    """TRL's trainer, which multiplies the gradient of each token's log-probability and entropy by a weight that is
    looked up by the completion.
    """

    weights: dict[tuple[int, ...], list[float]]

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        logprob, entropy, aux = super()._get_per_token_logps_and_entropies(model, input_ids, *arguments, **options)
        if logprob.requires_grad:
            columns = logprob.shape[1]
            weight = torch.zeros_like(logprob)
            for row, ids in enumerate(input_ids[:, -columns:].tolist()):
                own = next(found for key, found in self.weights.items() if tuple(ids[: len(key)]) == key)
                weight[row, : len(own)] = torch.tensor(own)
            logprob.register_hook(lambda gradient: gradient * weight)
            if entropy.requires_grad:
                entropy.register_hook(lambda gradient: gradient * weight)
        return logprob, entropy, aux


CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "two passes over a generation": {"num_iterations": 2, "max_steps": 2, "loss_type": "grpo"},
    "a reference": {"beta": 0.3, "loss_type": "grpo"},
    "a ratio of sequences": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "three quarters": {"token_ratio_start": 0.75, "token_ratio_end": 0.75, "loss_type": "dr_grpo"},
    "one micro-batch": {"gradient_accumulation_steps": 1, "order_rows": "none", "loss_type": "cispo"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_weighted_tokens(name: str, saved: str) -> None:
    options = {"policy": saved} | CASES[name]
    made, gradients, shapes = run(D3STrainer, **PREFIX | options)
    ratio, cuts = Fraction(options.get("token_ratio_start", 0.5)), []
    Weighted.weights = {}

    def remembered(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = rollouts(prompts, trainer)
        ids = found["completion_ids"]
        cuts.extend(cuts_of([len(each) for each in ids], ratio))
        for tokens, cut in zip(ids, cuts, strict=True):
            n, m = len(tokens), least(len(tokens), ratio)
            weights = [(n - m + 1) / (n - max(t, m) + 1) * (t <= cut) for t in range(1, n + 1)]
            Weighted.weights[tuple(tokens)] = weights
        return found

    theirs = {key: value for key, value in options.items() if not key.startswith(("token_", "order_"))}
    _, expected, _ = run(Weighted, remembered, **theirs)
    for ours, right in zip(gradients, expected, strict=True):
        assert right.norm() > 0
        assert float((ours - right).norm() / right.norm()) < 1e-5
    independent = not {"beta", "importance_sampling_level"} & options.keys()
    widest = max(cuts) if independent else 24
    assert all(columns - 6 <= widest for _, (_, columns) in shapes)  # prompts have at most 6 tokens
    assert made.state.log_history[0]["d3s/num_tokens_kept"] == sum(cuts)


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


@pytest.mark.parametrize("entropy_from", ["update", "rollout"])
def test_tokens_are_ranked_before_the_cuts_alone(entropy_from: str) -> None:
    options = COMBINED | {"token_ratio_start": 0.25, "token_ratio_end": 0.25, "entropy_from": entropy_from}
    cuts: list[int] = []

    def remembered(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = rollouts(prompts, trainer)
        cuts.extend(cuts_of([len(each) for each in found["completion_ids"]]))
        return found

    made, _, shapes = run(D3STrainer, remembered, gradient_accumulation_steps=1, **options)
    log = made.state.log_history[0]
    assert log["d3s/tokens_kept"] == -(-sum(cuts) // 4)
    assert log["d3s/token_share_asked"] == pytest.approx(0.125)
    assert all(columns - 6 <= max(cuts) for _, (_, columns) in shapes)
    assert len(shapes) == 1 + (entropy_from == "rollout")


def test_rows_without_an_advantage_are_not_forwarded_with_drop_zeros() -> None:
    def equal_but_two(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0] * (len(completion_ids) - GROUP) + [float(len(ids)) for ids in completion_ids[-GROUP:]]

    options = PREFIX | {"drop_zeros": True, "reward_funcs": equal_but_two, "gradient_accumulation_steps": 2}
    _, _, shapes = run(D3STrainer, **options)
    assert sum(rows for has_gradient, (rows, _) in shapes if has_gradient) <= GROUP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ratio_start": 0.4}, "token_ratio_start: got 0.4 with token_rule 'prefix'; takes a number in"),
        ({"loss_denominator": "kept"}, "loss_denominator: got 'kept' with token_rule 'prefix'; takes 'all'"),
        ({"entropy_from": "rollout"}, "entropy_from: got 'rollout' with token_rule 'prefix'; takes 'auto'"),
        ({"token_scope": "sequence"}, "token_scope: got 'sequence' with token_rule 'prefix'; takes 'batch'"),
    ],
)
def test_options_without_an_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(**PREFIX | options)
