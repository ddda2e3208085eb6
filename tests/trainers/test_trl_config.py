"""D3SConfig: its options, from code and from the command line, and the versions of TRL that it supports."""

from __future__ import annotations

import importlib
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
import trl
import yaml
from datasets import Dataset
from tiny_trl import arguments, model, run_example, share_of_even, tokenizer
from trl import GRPOConfig, TrlParser

from d3s_kernels import Budget
from d3s_kernels.integrations import trl as integration
from d3s_kernels.integrations._versions import untested
from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.selection.options import rollouts_of

OURS = D3SConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys()


def test_defaults_are_the_papers() -> None:
    """Its 8 of 32 rollouts at first, and all of them in the end, are shares, so that they suit every group."""
    config = D3SConfig("out", use_cpu=True, bf16=False)
    schedule = config.schedule()  # of TRL's 8 generations
    assert (schedule.start, schedule.end, schedule.shape) == (Budget(2, 0.05), Budget(8, 0.20), "linear")
    expected = {
        "entropy_from": "auto", "importance_sampling_level": "token", "espo_quantiles": [0.8], "espo_alpha": 0.02,
        "espo_denominator": "self", "sampling_mask": False, "max_kept": 512, "logits_dtype": "float32",
        "keep_logits_bytes": 0, "order_rows": "auto", "keep_all": False,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    schedule = D3SConfig("out", keep_all=True, num_generations=8, use_cpu=True, bf16=False).schedule()
    assert schedule.start == schedule.end == Budget(8, 1.0)


SHARE = "a share in (0, 1] of a group's rollouts, or their number, which is whole and above 1"
RISING = "rising numbers in (0, 1), at most 15"
BAD: list[tuple[str, Any, str]] = [
    ("rollout_scope", "sequence", "'batch' or 'group'"),
    ("token_scope", "group", "'batch' or 'sequence'"),
    ("entropy_from", "old", "'auto' or 'update' or 'rollout'"),
    ("loss_denominator", "none", "'kept' or 'all'"),
    ("keep_all", 1, "true or false"),
    ("order_rows", "length", "'auto' or 'work' or 'none'"),
    ("logits_dtype", "bfloat16", "'float32' or 'auto'"),
    ("keep_logits_bytes", -1, "a whole number of at least 0"),
    ("advantages_from", "group", "'all' or 'kept'"),
    *(("rollouts_end", value, SHARE) for value in (math.inf, math.nan, "half")),
    ("rollout_rule", "variance", "'max_variance' or 'highest' or 'largest_abs' or 'percentile' or 'random'"),
    ("token_ratio_start", "0.1", "a number in (0, 1]"),
    ("schedule_shape", "step", "'linear' or 'cosine' or 'exponential'"),
    ("drop_shared_tokens", 1, "true or false"),
    *(("group_variance_mass", value, "a number in (0, 1]") for value in (0, 1.5, True)),
    ("off_policy_rule", "icepop", "'none' or "),
    ("sampling_mask", "yes", "true or false"),
    ("max_kept", 0, "a whole number of at least 1"),
    *(("selection_page_steps", value, "a whole number of at least 0") for value in (-1, 0.5, True, None)),
    *(("espo_quantiles", value, RISING) for value in ([0.8, 0.2], 0.8, [0.5, 1.0], [0.0, 0.5])),
    ("espo_quantiles", [i / 20 for i in range(1, 17)], RISING),
    *(("espo_alpha", value, "a number above 0") for value in (0.0, math.inf)),
    ("espo_denominator", "new", "'self' or 'old'"),
    ("loss_type", "reinforce", "'bnpo' or "),
    ("importance_sampling_level", "group", "'token' or 'sequence' or 'entropy_group'"),
    ("top_entropy_quantile", 0.0, "a number above 0"),
]


@pytest.mark.parametrize(("name", "value", "takes"), BAD)
def test_bad_values_are_named(name: str, value: Any, takes: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {value!r}; takes {takes}")):
        arguments(**{name: value})


SETS, GENERATION = {"sampling_mask": True, "top_p": 0.9}, "generation_kwargs"
TOGETHER: dict[str, dict[str, Any]] = {
    "token_scope: got 'sequence' with token_rule .* 'batch'": {
        "token_rule": "entropy_quantile", "token_scope": "sequence",
    },
    "token_ratio_start: got 0.4 with token_rule 'prefix'; takes a number in": {"token_rule": "prefix", "tokens": 0.4},
    "entropy_from: got 'rollout' with token_rule 'prefix'; takes 'auto'": {
        "token_rule": "prefix", "tokens": 1.0, "entropy_from": "rollout",
    },
    "loss_type: got 'cispo' with importance_sampling_level 'entropy_group'; takes 'grpo' or 'bnpo'": {
        "importance_sampling_level": "entropy_group", "loss_type": "cispo",
    },
    **{
        f"{name}: got {value!r} beside top_entropy_quantile 0.25, w": {"top_entropy_quantile": 0.25, name: value}
        for name, value in {
            "token_rule": "advantage", "token_ratio_start": 0.5, "token_scope": "sequence", "drop_zeros": True,
        }.items()
    },
    "rollouts_start: got 0.5 beside keep_all, which takes 1.0; for another choice leave out keep_all": {
        "keep_all": True, "rollouts_start": 0.5,
    },
    **{
        f"{name}: got .* without importance_sampling_level='entropy_group', which alone reads it; takes": {name: value}
        for name, value in {"espo_quantiles": [0.5], "espo_alpha": 0.1, "espo_denominator": "old"}.items()
    },
    "max_kept: got 64 without sampling_mask=True, which alone reads it; takes 512": {"max_kept": 64},
    "advantages_from: got 'kept' beside keep_all": {
        "keep_all": True, "rollouts": 1.0, "tokens": 1.0, "advantages_from": "kept",
    },
    "refill: got -1; takes a whole number of at least 0": {"refill": -1},
    "scale_rewards: got 'batch' with refill; takes 'group' or 'none'": {"refill": 1, "scale_rewards": "batch"},
    "multi_objective_aggregation: got 'normalize_then_sum'": {
        "refill": 1, "multi_objective_aggregation": "normalize_then_sum",
    },
    "entropy_from: got 'update' with off_policy_rule 'kpop'": {"off_policy_rule": "kpop", "entropy_from": "update"},
    "vllm_importance_sampling_correction: got True with off_policy_rule 'token_mask', whose weights are the": {
        "off_policy_rule": "token_mask", "use_vllm": True,
    },
    "off_policy_high: got None with rule 'opsm'": {"off_policy_rule": "opsm"},
    "sampling_mask: got True with top_p 1.0, top_k 0 and min_p None, which leave no token out;": SETS | {"top_p": 1.0},
    r"sampling_mask: got True with .* no token out": SETS | {GENERATION: {"top_p": 1.0, "epsilon_cutoff": 0.0}},
    r"use_vllm: got True with sampling_mask; takes False: vLLM returns the sets from 0\.28": SETS | {"use_vllm": True},
    "use_transformers_continuous_batching: got True with sam": SETS | {"use_transformers_continuous_batching": True},
    "use_transformers_continuous_batching: got True with sampling_mask; takes": SETS | {"use_transformers_paged": True},
    "repetition_penalty: got 1.1 with sampling_mask; takes 1.0: it changes scores": SETS | {"repetition_penalty": 1.1},
    **{
        f"generation_kwargs: got {name!r} with sampling_mask; takes": SETS | {GENERATION: {name: value}}
        for name, value in {"sequence_bias": [[[3], 1.0]], "repetition_penalty": 1.1, "temperature": 0.5}.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("message", TOGETHER)
@pytest.mark.filterwarnings("ignore:`use_transformers_paged`")
def test_options_that_do_not_go_together_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(**TOGETHER[message])


CHANGED: dict[str, Any] = {
    "rollouts_start": 0.3, "rollouts_end": 5, "token_ratio_start": 0.1, "token_ratio_end": 0.3,
    "schedule_shape": "cosine", "rollout_rule": "largest_abs", "rollout_scope": "group", "token_rule": "advantage",
    "token_scope": "sequence", "entropy_from": "rollout", "loss_denominator": "all", "drop_zeros": True,
    "advantages_from": "kept", "selection_page_steps": 7, "importance_sampling_level": "entropy_group",
    "espo_quantiles": [0.5, 0.9], "espo_alpha": 0.1, "espo_denominator": "old", "sampling_mask": True, "max_kept": 64,
    "refill": 2, "off_policy_rule": "token_mask", "off_policy_low": 0.4, "off_policy_high": 4.0,
    "logits_dtype": "auto", "keep_logits_bytes": 1 << 30, "order_rows": "work", "group_variance_mass": 0.5,
    "drop_shared_tokens": True,
}  # fmt: skip


def configured(way: str, folder: Path, options: dict[str, Any]) -> D3SConfig:
    options = {"output_dir": "out", "use_cpu": True, "bf16": False} | options
    if way == "python":
        return D3SConfig(**options)
    words = ["--config", str(folder / "options.yaml")]
    if way == "yaml":
        (folder / "options.yaml").write_text(yaml.safe_dump(options), "utf-8")
    else:
        given = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
        words = [word for name, values in given.items() for word in (f"--{name}", *map(str, values))]
    (config,) = TrlParser([D3SConfig]).parse_args_and_config(words)
    return config


three_ways = pytest.mark.parametrize("way", ["python", "command line", "yaml"])


@three_ways
def test_every_option_can_be_set(way: str, tmp_path: Path) -> None:
    assert OURS - {"keep_all"} | {"importance_sampling_level"} == CHANGED.keys()
    config = configured(way, tmp_path, {"num_generations": 8, "top_k": 50} | CHANGED)
    assert {name: getattr(config, name) for name in CHANGED} == CHANGED
    assert (config.schedule().start, config.schedule().end) == (Budget(2, 0.1), Budget(5, 0.3))


def test_every_option_has_help() -> None:
    actions = {action.dest: action for action in TrlParser([D3SConfig])._actions}
    for name in OURS:
        assert len(actions[name].help) > 20, name


@three_ways
def test_trls_share_of_high_entropy_is_taken_for_what_it_means(way: str, tmp_path: Path) -> None:
    implied = {"loss_denominator": "all"} if way == "python" else {}
    config = configured(way, tmp_path, {"top_entropy_quantile": 0.2} | implied)
    assert (config.token_rule, config.loss_denominator, config.top_entropy_quantile) == ("entropy", "all", 0.2)
    assert (config.schedule().start, config.schedule().end) == (Budget(2, 0.2), Budget(8, 0.2))


def test_a_quantile_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments(token_rule="entropy_quantile").token_rule == "entropy_quantile"
    monkeypatch.setattr(D3SConfig, "world_size", 2)
    with pytest.raises(ValueError, match="token_rule: got 'entropy_quantile' with 2 processes; takes 'entropy', which"):
        arguments(token_rule="entropy_quantile")


@pytest.mark.parametrize(
    ("given", "group", "expected"),
    [(0.25, 8, 2), (0.25, 10, 3), (0.29, 50, 15), (0.01, 64, 2), (1, 8, 8), (1.0, 8, 8), (2, 8, 2), (12.0, 8, 8)],
)
def test_budgets_are_shares_or_numbers(given: float, group: int, expected: int) -> None:
    """0.29 of 50 is 14.5, rounded half up, though the product of the two floats is less."""
    assert rollouts_of(given, group) == expected


def test_a_trainer_takes_its_own_config_only() -> None:
    with pytest.raises(TypeError, match="args: got a GRPOConfig; takes a D3SConfig"):
        D3STrainer(model(), share_of_even, arguments(GRPOConfig))


def test_other_versions_of_trl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.14.2", "1.17.0"):
        monkeypatch.setattr(trl, "__version__", version)
        with pytest.raises(ImportError, match=rf"found trl {version}; takes trl>=1\.15,<1\.17, .* D3S_TRL_UNTESTED=1"):
            importlib.reload(integration)
    for version in ("1.15.0", "1.17.0"):  # prefix trees came with 1.16
        monkeypatch.setattr(trl, "__version__", version)
        with pytest.raises(ImportError, match=rf"found trl {version}; takes trl>=1\.16,<1\.17"):
            integration.D3SAsyncGRPOTrainer  # noqa: B018  # its import is refused
    monkeypatch.setenv("D3S_TRL_UNTESTED", "1")
    with pytest.warns(RuntimeWarning, match=r"found trl 1\.17\.0; takes trl>=1\.15,<1\.17, which the tests cover"):
        assert untested("trl", "1.17.0", "1.15", "1.17", "tests/trainers") is None


@pytest.mark.skipif("D3S_TEST_TRL" not in os.environ, reason="no version was asked for")
def test_this_is_the_version_that_was_asked_for() -> None:
    assert trl.__version__ == os.environ["D3S_TEST_TRL"]


@pytest.mark.parametrize("documented", [D3SConfig, D3STrainer])
def test_examples(documented: type, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(D3STrainer, "log", lambda self, *_: None)  # it prints
    elsewhere = {"use_cpu": True, "bf16": False, "report_to": [], "max_completion_length": 4, "disable_tqdm": True}
    prompts = Dataset.from_dict({"prompt": ["w2 w3", "w4"] * 8})
    run_example(
        documented, model=model(), reward=share_of_even, prompts=prompts, tokenizer=tokenizer(), elsewhere=elsewhere
    )
