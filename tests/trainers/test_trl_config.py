"""D3SConfig: its options, from code and from the command line, and the versions of TRL that it supports."""

from __future__ import annotations

import dataclasses
import doctest
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
import tiny_trl
import trl
import yaml
from datasets import Dataset
from trl import GRPOConfig, TrlParser

import d3s_kernels as d3s
from d3s_kernels import Budget
from d3s_kernels.integrations import trl as integration
from d3s_kernels.integrations._options import rollouts_of
from d3s_kernels.integrations.trl import D3SConfig, D3STrainer

OURS = {field.name: field for field in dataclasses.fields(D3SConfig)}.keys() - {
    field.name for field in dataclasses.fields(GRPOConfig)
}


def test_defaults_are_the_papers() -> None:
    """Its 8 of 32 rollouts at first, and all of them in the end, are shares, so that they suit every group."""
    config = D3SConfig("out", use_cpu=True, bf16=False)
    assert (config.rollouts_start, config.rollouts_end) == (0.25, 1.0)
    assert config.schedule().start == Budget(2, 0.05)  # of TRL's 8 generations
    assert config.schedule().end == Budget(8, 0.20)
    assert (config.schedule().shape, config.rollout_scope, config.token_scope) == ("linear", "batch", "batch")
    assert (config.rollout_rule, config.token_rule) == ("max_variance", "advantage_entropy")
    assert (config.entropy_from, config.loss_denominator, config.drop_zeros) == ("auto", "kept", False)
    assert config.advantages_from == "all"
    assert (config.importance_sampling_level, config.espo_quantiles, config.espo_alpha) == ("token", [0.8], 0.02)
    assert config.espo_denominator == "self"
    assert (config.sampling_mask, config.max_kept) == (False, 512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_scope": "sequence"}, r"rollout_scope: got 'sequence'; takes 'batch' or 'group'"),
        ({"token_scope": "group"}, r"token_scope: got 'group'; takes 'batch' or 'sequence'"),
        ({"entropy_from": "old"}, r"entropy_from: got 'old'; takes 'auto' or 'update' or 'rollout'"),
        ({"loss_denominator": "none"}, r"loss_denominator: got 'none'; takes 'kept' or 'all'"),
        ({"advantages_from": "group"}, r"advantages_from: got 'group'; takes 'all' or 'kept'"),
        (
            {"rollouts_start": 0},
            r"rollouts_start: got 0; takes a share in \(0, 1\] of a group's rollouts, or their numb",
        ),
        ({"rollouts_start": 4.5}, r"rollouts_start: got 4.5; takes a share .* whole and above 1"),
        ({"rollouts_end": math.inf}, r"rollouts_end: got inf; takes a share"),
        ({"rollouts_end": math.nan}, r"rollouts_end: got nan; takes a share"),
        ({"rollouts_end": None}, r"rollouts_end: got None; takes a share"),
        ({"rollout_rule": "variance"}, r"rollout_rule: got 'variance'; takes 'max_variance' or 'highest' or 'largest_"),
        ({"token_rule": "top"}, r"token_rule: got 'top'; takes 'advantage_entropy' or 'entropy' or 'advantage' or 'ra"),
        (
            {"token_rule": "entropy_quantile", "token_scope": "sequence"},
            r"token_scope: got 'sequence' with token_rule 'entropy_quantile'; takes 'batch'",
        ),
        (
            {"token_rule": "entropy_quantile", "drop_zeros": True},
            r"drop_zeros: got True with token_rule .*; takes False",
        ),
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
        ({"top_entropy_quantile": 0.0}, r"top_entropy_quantile: got 0.0; takes a number above 0"),
        *(
            (
                {"top_entropy_quantile": 0.25, name: value},
                rf"{name}: got {value!r} beside top_entropy_quantile 0.25, which",
            )
            for name, value in {
                "token_rule": "advantage",
                "token_ratio_start": 0.5,
                "token_scope": "sequence",
                "drop_zeros": True,
            }.items()
        ),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_trl.arguments(**options)


CHANGED: dict[str, Any] = {
    "rollouts_start": 0.3, "rollouts_end": 5, "token_ratio_start": 0.1, "token_ratio_end": 0.3,
    "schedule_shape": "cosine", "rollout_rule": "largest_abs", "rollout_scope": "group", "token_rule": "random",
    "token_scope": "sequence", "entropy_from": "rollout", "loss_denominator": "all", "drop_zeros": True,
    "advantages_from": "kept", "selection_page_steps": 7, "importance_sampling_level": "entropy_group",
    "espo_quantiles": [0.5, 0.9], "espo_alpha": 0.1, "espo_denominator": "old", "sampling_mask": True, "max_kept": 64,
}  # fmt: skip


def as_words(options: dict[str, Any]) -> list[str]:
    """The options as on a command line."""
    words = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


@pytest.mark.parametrize("way", ["python", "command line", "yaml"])
def test_every_option_can_be_set_in_three_ways(way: str, tmp_path: Path) -> None:
    assert OURS | {"importance_sampling_level"} == CHANGED.keys()
    everything = {"output_dir": "out", "use_cpu": True, "bf16": False, "num_generations": 8, "top_k": 50} | CHANGED
    if way == "python":
        config = D3SConfig(**everything)
    else:
        words = as_words(everything)
        if way == "yaml":
            (tmp_path / "options.yaml").write_text(yaml.safe_dump(everything), "utf-8")
            words = ["--config", str(tmp_path / "options.yaml")]
        (config,) = TrlParser([D3SConfig]).parse_args_and_config(words)
    assert {name: getattr(config, name) for name in CHANGED} == CHANGED
    assert (config.schedule().start, config.schedule().end) == (Budget(2, 0.1), Budget(5, 0.3))


def test_every_option_has_help() -> None:
    actions = {action.dest: action for action in TrlParser([D3SConfig])._actions}
    for name in OURS:
        assert len(actions[name].help) > 20, name
    for name, signature in {"rollout_rule": d3s.select_rollouts, "token_rule": d3s.select_tokens}.items():
        for rule in actions[name].choices:
            assert f'"{rule}"' in signature.__doc__


@pytest.mark.parametrize("way", ["python", "command line", "yaml"])
def test_trls_share_of_high_entropy_is_taken_for_what_it_means(way: str, tmp_path: Path) -> None:
    options = {"output_dir": "out", "use_cpu": True, "bf16": False, "top_entropy_quantile": 0.2}
    if way == "python":
        config = D3SConfig(**options, loss_denominator="all")  # as it is implied
    elif way == "yaml":
        (tmp_path / "options.yaml").write_text(yaml.safe_dump(options), "utf-8")
        (config,) = TrlParser([D3SConfig]).parse_args_and_config(["--config", str(tmp_path / "options.yaml")])
    else:
        (config,) = TrlParser([D3SConfig]).parse_args_and_config(as_words(options))
    assert (config.token_rule, config.loss_denominator, config.top_entropy_quantile) == ("entropy", "all", 0.2)
    assert (config.schedule().start, config.schedule().end) == (Budget(2, 0.2), Budget(8, 0.2))


def test_a_quantile_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny_trl.arguments(token_rule="entropy_quantile").token_rule == "entropy_quantile"
    monkeypatch.setattr(D3SConfig, "world_size", 2)
    with pytest.raises(ValueError, match="token_rule: got 'entropy_quantile' with 2 processes; takes 'entropy', which"):
        tiny_trl.arguments(token_rule="entropy_quantile")


@pytest.mark.parametrize(
    ("given", "group", "expected"),
    [(0.25, 8, 2), (0.25, 10, 3), (0.29, 50, 15), (0.01, 64, 2), (1, 8, 8), (1.0, 8, 8), (2, 8, 2), (12.0, 8, 8)],
)
def test_budgets_are_shares_or_numbers(given: float, group: int, expected: int) -> None:
    """0.29 of 50 is 14.5, rounded half up, though the product of the two floats is less."""
    assert rollouts_of(given, group) == expected


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
