"""Two steps of ms-swift's GRPO with the plug-in, compared with ms-swift's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("swift.rlhf_trainers", reason="needs ms-swift (make test-swift)")

from processes import run_processes
from swift.rlhf_trainers import GRPOTrainer
from tiny_swift import GROUP, STEPS, Run, after, train

from d3s_kernels import max_variance_select, reference
from d3s_kernels.integrations.swift.trainer import Kept

ALL = {"rollouts_start": 1, "rollouts_end": 1, "token_ratio_start": 1, "token_ratio_end": 1}
HALF = {"rollouts_start": 4, "rollouts_end": 4, "token_ratio_start": 0.25, "token_ratio_end": 0.25}


def assert_equal(one: Run, other: Run, tolerance: float = 2e-5) -> None:
    for name, value in one.weights.items():
        torch.testing.assert_close(value, other.weights[name], atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo", "beta": 0.1},
        {"loss_type": "sapo", "importance_sampling_level": "sequence_token", "num_iterations": 2},
        {"loss_type": "bnpo", "padding_free": True},
        {"loss_type": "dr_grpo", "tuner_type": "lora", "beta": 0.1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_nothing_dropped_is_ms_swift(folder: Path, options: dict[str, Any]) -> None:
    plain, ours = train(folder, **options), train(folder, ALL, **options)
    assert type(plain.trainer) is GRPOTrainer
    assert type(ours.trainer).__name__ == "D3STrainer"
    assert_equal(plain, ours)
    before = train(folder, ALL, **options, max_steps=1)
    with pytest.raises(AssertionError):  # the steps change the weights by more than the tolerance
        assert_equal(ours, before)


@pytest.mark.parametrize("padding_free", [False, True])
def test_dropped_rollouts_are_never_forwarded(folder: Path, padding_free: bool) -> None:
    """Counts the rows of the forwards that score tokens. Generation uses a cache, so it is not counted."""
    rows: dict[str, int] = {}

    def watch(trainer: GRPOTrainer) -> None:
        def count(name: str, inputs: dict[str, Any]) -> None:
            if inputs.get("use_cache") is False:
                positions = inputs.get("position_ids")
                packed = inputs.get("attention_mask") is None and positions is not None
                rows[name] += int((positions == 0).sum()) if packed else len(inputs["input_ids"])

        rows.update(policy=0, reference=0)
        for name, model in (("policy", trainer.model), ("reference", trainer.ref_model)):
            model.register_forward_pre_hook(lambda *given, name=name: count(name, given[2]), with_kwargs=True)

    everything = GROUP * STEPS * 2  # rollouts of both steps
    train(folder, before=watch, beta=0.1, padding_free=padding_free)
    # The policy scores each rollout for its old log-probabilities and for the loss, the reference once.
    assert rows == {"policy": 2 * everything, "reference": everything}
    run = train(folder, HALF, before=watch, beta=0.1, padding_free=padding_free)
    assert rows == {"policy": everything, "reference": everything // 2}
    assert run.logged("d3s/rollouts_kept") == [GROUP * STEPS / 2] * 2
    assert all(number > 0 for number in run.logged("d3s/tokens_not_forwarded"))
    assert run.logged("d3s/head_rows_not_computed") == []  # ms-swift's head computes every row


def test_the_table_of_completions_has_all_rollouts(folder: Path, tmp_path: Path) -> None:
    run = train(folder, HALF, log_completions=True, output_dir=tmp_path)
    (written,) = tmp_path.rglob("completions.jsonl")
    tables = [json.loads(line) for line in written.read_text().splitlines()][:2]  # the last one comes twice
    for table in tables:
        assert {len(column) for column in table.values()} == {GROUP * STEPS}
        rewards = torch.tensor(table["Vowels"]).view(-1, GROUP)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(torch.tensor(table["advantages"]).view_as(expected), expected)
        texts = [sum(one in "aeiouAEIOU02468" for one in text) / max(len(text), 1) for text in table["completion"]]
        assert table["Vowels"] == pytest.approx(texts)
    assert run.logged("d3s/rollouts_kept") == [GROUP] * 2


def test_prefixes_have_the_weights_of_their_cuts(folder: Path) -> None:
    """1 / P(before the cut). A rollout's random number belongs to its place among all rollouts, kept or dropped."""
    rollouts, options = {"rollouts_start": 4, "rollouts_end": 4}, {"loss_type": "grpo", "beta": 0.1}
    kept: list[int] = []
    shares: list[float] = []

    def weigh(trainer: Any) -> None:
        def remember(remaining: Any, samples: Any) -> None:
            kept[:] = [place for place, one in enumerate(samples) if any(one is left for left in remaining)]

        def cut(result: None, samples: Any, parts: list[Any]) -> None:
            seed = trainer.args.seed + 1_000_003 * trainer.state.global_step + 499_979
            generator = torch.Generator().manual_seed(seed)
            draws = torch.rand(GROUP * STEPS, dtype=torch.float64, generator=generator)[kept]
            masks = [part.completion_mask.bool() for part in parts]
            for part, mask, of_rows in zip(parts, masks, draws.split([len(mask) for mask in masks]), strict=True):
                tokens, weight, _ = reference.random_prefixes(mask, 0.5, draws=of_rows)
                part.d3s_kept = Kept(tokens, weight)
            before = sum(int(part.d3s_kept.tokens.sum()) for part in parts)
            shares.append(before / sum(int(mask.sum()) for mask in masks))

        after(trainer, "_keep_rollouts", remember)
        after(trainer, "_choose_tokens", cut)

    everything = {"token_ratio_start": 1, "token_ratio_end": 1, "loss_denominator": "all"}
    expected = train(folder, rollouts | everything, before=weigh, **options)
    ours = train(folder, rollouts | {"token_rule": "prefix"}, **options)
    assert_equal(ours, expected)
    assert ours.logged("d3s/token_share") == pytest.approx(shares)
    assert ours.logged("d3s/token_share_asked") == [0.5, 0.5]
    with pytest.raises(AssertionError):
        assert_equal(ours, train(folder, rollouts | everything, **options))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo", "sapo"])
def test_the_loss_is_the_mean_over_kept_tokens(folder: Path, loss_type: str) -> None:
    """The same as ms-swift's loss of a batch that has the kept tokens alone. Ratios are 1 in the first step."""

    def only_kept(result: None, samples: Any, parts: list[Any]) -> None:
        for part in parts:
            part.completion_mask = part.d3s_kept.tokens
            part.d3s_kept = Kept(torch.ones_like(part.completion_mask), torch.ones(()))
        number = sum(part.completion_mask.sum() for part in parts)
        for part in parts:
            part.num_items_in_batch = number

    options = {"loss_type": loss_type, "beta": 0.1, "max_steps": 1}
    ours = train(folder, HALF, **options)
    assert_equal(ours, train(folder, HALF, before=lambda one: after(one, "_choose_tokens", only_kept), **options))
    other = {"loss_denominator": "all"} if loss_type != "sapo" else {"token_rule": "advantage"}
    assert ours.logged("grad_norm") != train(folder, HALF | other, **options).logged("grad_norm")


def test_a_rollout_that_ms_swift_filters_takes_no_place(folder: Path) -> None:
    """overlong_filter leaves no token of a truncated rollout in the loss: its advantage counts as 0 in the choice."""
    steps = []

    def watch(trainer: Any) -> None:
        def check(remaining: Any, samples: Any) -> None:
            truncated = torch.tensor([one.is_truncated for one in samples])
            ranked = trainer._advantages.masked_fill(truncated, 0)
            expected = max_variance_select(ranked, len(samples) // 2).tolist()
            steps.append(truncated.any() and not truncated.all())
            assert remaining == [one for one, stays in zip(samples, expected, strict=True) if stays]
            assert expected != max_variance_select(trainer._advantages, len(samples) // 2).tolist()

        after(trainer, "_keep_rollouts", check)

    run = train(folder, HALF, before=watch, overlong_filter=True)
    assert steps == [True, True]
    for batch in run.trainer._buffered_inputs:
        part = batch["grpo_batch"]
        assert not part.d3s_kept.tokens[part.truncated_mask].any()


def test_processes_choose_together(folder: Path) -> None:
    """In each of two processes, as `swift rlhf` starts them; the checks are in two_ranks.py."""
    printed = run_processes(Path(__file__).with_name("two_ranks.py"), 2, folder)
    assert printed.count("both ranks agree") == 2


def with_log_probabilities(trainer: Any) -> None:
    """Rollouts as vLLM returns them: with log-probabilities, here of another policy."""
    score = trainer._score_completions

    def scoring(samples: Any) -> Any:
        for sample in samples:
            tokens = sample.response_token_ids
            sample.rollout_logprobs = [[-1.5 - math.cos(7 * token + place) for place, token in enumerate(tokens)]]
        return score(samples)

    trainer._score_completions = scoring
    trainer.disable_rollout_importance_sampling = False  # which it is without vLLM


def test_off_policy_tokens_are_left_out_as_by_ms_swift(folder: Path) -> None:
    """With the weights of ms-swift's own mode, whose tokens keep their place in the loss's denominator."""
    options = {"loss_type": "dapo", "beta": 0.1}
    theirs = {"rollout_importance_sampling_mode": "token_mask", "rollout_importance_sampling_threshold": 1.5}
    rule = {"off_policy_rule": "token_mask", "off_policy_low": 0, "off_policy_high": 1.5}
    plain = train(folder, before=with_log_probabilities, **options, **theirs)
    ours = train(folder, ALL | rule, before=with_log_probabilities, **options)
    assert_equal(plain, ours)
    assert all(0 < share < 1 for share in ours.logged("d3s/off_policy_share"))


def test_rollouts_without_log_probabilities_are_left_out(folder: Path) -> None:
    """ms-swift then has none for their micro-batch. Others are trained on."""

    def without_one(scored: Any, samples: Any) -> None:
        samples[0].rollout_logprobs = None

    def with_some(trainer: Any) -> None:
        with_log_probabilities(trainer)
        after(trainer, "_score_completions", without_one)

    rule = {"off_policy_rule": "token_mask", "off_policy_low": 0, "off_policy_high": 1e9}
    shares = train(folder, ALL | rule, before=with_some).logged("d3s/off_policy_share")
    assert all(0.2 < share < 0.8 for share in shares)  # one micro-batch of two


def test_an_off_policy_rule_without_log_probabilities_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="d3s_off_policy_rule: got 'kpop', and rollouts without log-probabilities"):
        train(folder, ALL | {"off_policy_rule": "kpop"})
    rule = ALL | {"off_policy_rule": "token_mask"}
    with pytest.raises(ValueError, match="rollout_importance_sampling_mode: got 'token_mask', which D3S does not take"):
        train(folder, rule, rollout_importance_sampling_mode="token_mask")
