"""The options of D3S on ms-swift's command line, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("swift.rlhf_trainers", reason="needs ms-swift (make test-swift)")

from swift.trainers import TrainerFactory
from tiny_swift import train

from d3s_kernels.integrations.swift import PLUGIN
from d3s_kernels.integrations.swift.config import D3SConfig
from d3s_kernels.integrations.swift.register import register


def config(**changed: Any) -> D3SConfig:
    kinds = {"advantage_estimator": "grpo", "kl_in_reward": False, "scale_rewards": "group", "loss_type": "grpo"}
    common = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": [], "num_generations": 8}
    return D3SConfig(**{**kinds, **common, **changed})


def test_options_are_read_from_model_kwargs() -> None:
    made = config(model_kwargs={"d3s_rollouts_start": 4, "d3s_token_scope": "sequence", "max_pixels": 1024})
    assert (made.rollouts_start, made.rollouts_end, made.token_scope) == (4, 1.0, "sequence")


def test_top_entropy_quantile_is_a_choice_by_entropy() -> None:
    made = config(top_entropy_quantile=0.2)
    assert (made.token_rule, made.token_ratio_start, made.token_ratio_end) == ("entropy", 0.2, 0.2)
    assert made.top_entropy_quantile == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_kwargs": {"d3s_rollout_start": 4}}, "model_kwargs: got 'd3s_rollout_start', which is no option"),
        ({"model_kwargs": {"D3S_ROLLOUTS_START": 4}}, "model_kwargs: got 'D3S_ROLLOUTS_START'"),
        ({"model_kwargs": {"d3s_rollouts_start": "4"}}, "d3s_rollouts_start: got '4'; takes a share"),
        ({"loss_type": "real"}, "loss_type: got 'real'; takes 'grpo' or"),
        ({"loss_type": "fipo"}, "loss_type: got 'fipo'; takes 'grpo' or"),
        ({"kl_in_reward": True, "beta": 0.1}, "kl_in_reward: got True, which D3S does not take: advantages would"),
        ({"sdar_loss_coef": 0.1}, "sdar_loss_coef: got 0.1, which D3S does not take"),
        ({"advantage_reweight": "rlsd"}, "advantage_reweight: got 'rlsd', which D3S does not take"),
        ({"off_policy_sequence_mask_delta": 0.5}, "off_policy_sequence_mask_delta: got 0.5, which D3S does not"),
        ({"log_entropy": True, "log_completions": True}, "log_entropy: got True, which D3S does not take"),
        ({"chord_sft_dataset": ["a"]}, r"chord_sft_dataset: got \['a'\], which D3S does not take"),
        (
            {"scale_rewards": "gdpo", "model_kwargs": {"d3s_advantages_from": "kept"}},
            "d3s_advantages_from: got 'kept' with advantage_estimator 'grpo' and scale_rewards 'gdpo'",
        ),
        (
            {"top_entropy_quantile": 0.2, "model_kwargs": {"d3s_token_rule": "advantage"}},
            "token_rule: got 'advantage' beside top_entropy_quantile 0.2",
        ),
    ],
)
def test_what_is_not_covered_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_a_loss_that_scores_no_tokens_is_refused(folder: Path) -> None:
    def constant(trainer: Any) -> None:
        parameter = next(trainer.model.parameters())
        trainer._compute_loss = lambda *_: 0 * parameter.sum()

    with pytest.raises(RuntimeError, match="asked 0 times for scores of tokens with a gradient; takes one that asks"):
        train(folder, {}, before=constant)


def test_a_teachers_prompts_are_refused(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "ab"}], "teacher_prompt": "cd"}\n' * 16)
    with pytest.raises(ValueError, match="teacher_prompt, teacher_images: got a column of the dataset for a teacher"):
        train(folder, {}, dataset=data)


def test_another_trainer_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", "mine.Trainer")
    with pytest.raises(ImportError, match=r"mine\.Trainer already replaces ms-swift's GRPO"):
        register()


def test_other_versions_and_megatron_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.5.2", "4.7.0"):
        monkeypatch.setattr("swift.__version__", version)
        with pytest.raises(ImportError, match=rf"ms-swift {version}; takes .*>=4\.6,<4\.7, .* D3S_SWIFT_UNTESTED=1"):
            register()
    monkeypatch.setattr("swift.__version__", "4.6.0")
    monkeypatch.setitem(sys.modules, "swift.megatron.trainers", sys)
    with pytest.raises(ImportError, match="got Megatron-SWIFT, which has another trainer; takes `swift rlhf`"):
        register()


def test_the_plug_in_is_alone_in_its_folder() -> None:
    """ms-swift puts the folder at the front of sys.path, where other files would hide modules."""
    command = [sys.executable, "-m", "d3s_kernels.integrations.swift"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == PLUGIN
    assert [path.name for path in Path(PLUGIN).parent.glob("*.py")] == ["d3s_plugin.py"]
