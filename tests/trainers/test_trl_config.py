"""D3SConfig: its options, from code and from the command line, and the versions of TRL that it supports."""

from __future__ import annotations

import dataclasses
import doctest
import math
import os
from typing import Any

import pytest

pytest.importorskip("trl")
import tiny_trl
import trl
from datasets import Dataset
from trl import GRPOConfig, TrlParser

from d3s_kernels import Budget
from d3s_kernels.integrations import trl as integration
from d3s_kernels.integrations.trl import D3SConfig, D3STrainer

OURS = {field.name: field for field in dataclasses.fields(D3SConfig)}.keys() - {
    field.name for field in dataclasses.fields(GRPOConfig)
}


def test_defaults_are_the_papers() -> None:
    config = D3SConfig("out", use_cpu=True, bf16=False)
    assert config.schedule().start == Budget(8, 0.05)
    assert config.schedule().end == Budget(32, 0.20)
    assert (config.schedule().shape, config.rollout_scope, config.token_scope) == ("linear", "batch", "batch")
    assert (config.entropy_from, config.loss_denominator, config.drop_zeros) == ("auto", "kept", False)
    assert config.advantages_from == "all"
    assert (config.importance_sampling_level, config.espo_quantiles, config.espo_alpha) == ("token", [0.8], 0.02)
    assert config.espo_denominator == "self"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_scope": "sequence"}, r"rollout_scope: got 'sequence'; takes 'batch' or 'group'"),
        ({"token_scope": "group"}, r"token_scope: got 'group'; takes 'batch' or 'sequence'"),
        ({"entropy_from": "old"}, r"entropy_from: got 'old'; takes 'auto' or 'update' or 'rollout'"),
        ({"loss_denominator": "none"}, r"loss_denominator: got 'none'; takes 'kept' or 'all'"),
        ({"advantages_from": "group"}, r"advantages_from: got 'group'; takes 'all' or 'kept'"),
        ({"rollouts_start": 0}, r"rollouts_start: got 0; takes a whole number of at least 1"),
        ({"rollouts_start": 4.5}, r"rollouts_start: got 4.5; takes a whole number of at least 1"),
        ({"rollouts_end": None}, r"rollouts_end: got None; takes a whole number of at least 1"),
        ({"token_ratio_end": 1.5}, r"token_ratio_end: got 1.5; takes a number in \(0, 1\]"),
        ({"token_ratio_start": "0.1"}, r"token_ratio_start: got '0.1'; takes a number in \(0, 1\]"),
        ({"schedule_shape": "step"}, r"schedule_shape: got 'step'; takes 'linear' or 'cosine' or 'exponential'"),
        ({"drop_zeros": "false"}, r"drop_zeros: got 'false'; takes true or false"),
        (
            {"espo_quantiles": [0.8, 0.2]},
            r"espo_quantiles: got \[0.8, 0.2\]; takes rising numbers in",
        ),
        ({"espo_quantiles": 0.8}, r"espo_quantiles: got 0.8; takes rising numbers"),
        ({"espo_quantiles": [i / 20 for i in range(1, 17)]}, r"espo_quantiles: got .*; takes rising numbers"),
        ({"espo_quantiles": [0.5, 1.0]}, r"espo_quantiles: got \[0.5, 1.0\]; takes rising numbers"),
        ({"espo_quantiles": [0.0, 0.5]}, r"espo_quantiles: got \[0.0, 0.5\]; takes rising numbers"),
        ({"espo_alpha": 0.0}, r"espo_alpha: got 0.0; takes a number above 0"),
        ({"espo_alpha": math.inf}, r"espo_alpha: got inf; takes a number above 0"),
        ({"espo_denominator": "new"}, r"espo_denominator: got 'new'; takes 'self' or 'old'"),
        (
            {"importance_sampling_level": "group"},
            r"importance_sampling_level: got 'group'; takes 'token' or",
        ),
        (
            {"importance_sampling_level": "entropy_group", "loss_type": "cispo"},
            r"loss_type: got 'cispo' with importance_sampling_level 'entropy_group'; takes 'grpo' or 'bnpo'",
        ),
        ({"top_entropy_quantile": 0.2}, r"top_entropy_quantile: got 0.2; D3S chooses tokens itself and takes 1.0"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_trl.arguments(**options)


def test_every_option_has_help_and_can_be_set_from_the_command_line() -> None:
    parser = TrlParser([D3SConfig])
    actions = {action.dest: action for action in parser._actions}
    assert len(OURS) == 15
    for name in OURS:
        assert len(actions[name].help) > 20, name
    given = (
        "--output_dir out --use_cpu true --bf16 false --rollouts_start 3 --rollouts_end 5 --token_ratio_start 0.1 "
        "--token_ratio_end 0.3 --schedule_shape cosine --rollout_scope group --token_scope sequence --entropy_from "
        "rollout --loss_denominator all --drop_zeros true --advantages_from kept --importance_sampling_level "
        "entropy_group --espo_quantiles 0.5 0.9 --espo_alpha 0.1 --espo_denominator old"
    )
    (config,) = parser.parse_args_and_config(given.split())
    assert config.schedule().start == Budget(3, 0.1)
    assert config.schedule().end == Budget(5, 0.3)
    assert [getattr(config, name) for name in ("rollout_scope", "token_scope", "entropy_from")] == [
        "group", "sequence", "rollout",
    ]  # fmt: skip
    assert (config.schedule_shape, config.loss_denominator, config.drop_zeros) == ("cosine", "all", True)
    assert config.advantages_from == "kept"
    assert (config.importance_sampling_level, config.espo_quantiles) == ("entropy_group", [0.5, 0.9])
    assert (config.espo_alpha, config.espo_denominator) == (0.1, "old")


def test_a_trainer_takes_its_own_config_only() -> None:
    with pytest.raises(TypeError, match="args: got a GRPOConfig; takes a D3SConfig"):
        D3STrainer(tiny_trl.model(), tiny_trl.share_of_even, tiny_trl.arguments(GRPOConfig))


def test_other_versions_of_trl_are_named() -> None:
    with pytest.raises(ImportError, match=r"found TRL 1\.14\.2; takes 1\.15 to 1\.16"):
        integration._check_version("1.14.2")
    with pytest.warns(UserWarning, match=r"found TRL 1\.17\.0; tested with 1\.15 to 1\.16"):
        integration._check_version("1.17.0")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("version", ["1.15.0", "1.16.0", "1.16.7"])
def test_tested_versions_are_taken_silently(version: str) -> None:
    integration._check_version(version)


@pytest.mark.skipif("D3S_TEST_TRL" not in os.environ, reason="no version was asked for")
def test_this_is_the_version_that_was_asked_for() -> None:
    assert trl.__version__ == os.environ["D3S_TEST_TRL"]


@pytest.mark.parametrize("documented", [D3SConfig, D3STrainer])
def test_examples(documented: type, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "model": tiny_trl.model(),
        "reward": tiny_trl.share_of_even,
        "prompts": Dataset.from_dict({"prompt": ["w2 w3", "w4"] * 8}),
        "tokenizer": tiny_trl.tokenizer(),
        "elsewhere": {
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "max_completion_length": 4,
            "disable_tqdm": True,
        },
    }
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, globs=given)
    assert test.examples
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    monkeypatch.setattr("d3s_kernels.integrations.trl.trainer.D3STrainer.log", lambda self, *_: None)  # it prints
    runner.run(test, out=report.append)
    assert not report, "".join(report)
