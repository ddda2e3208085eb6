"""Whole training runs with D3STrainer in TRL's set-ups, and which forwards it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import forwards, generation_batch, looked_at, micro_batch, texts
from datasets import Dataset
from peft import LoraConfig
from tiny_trl import GROUP, VOCABULARY, PlainTrainer, model, share_of_even, trainer
from transformers import Qwen2Config

from d3s_kernels._lm_head import backward
from d3s_kernels.integrations import trl as integration
from d3s_kernels.integrations.trl import D3STrainer
from d3s_kernels.integrations.trl import trainer as module


def test_a_resumed_run_goes_on_where_it_was(saved: str, tmp_path: Path) -> None:
    """From a checkpoint between two logs. A second run of the same trainer begins anew."""

    def run(folder: Path, resume: str | None = None) -> Any:
        made = trainer(
            policy=saved, output_dir=str(folder), save_strategy="steps", save_steps=3, max_steps=6, logging_steps=2,
            rollouts_start=2, rollouts_end=8,
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return made

    def logged(made: Any) -> list[dict[str, float]]:
        return [row for row in made.state.log_history if "loss" in row]

    made = run(tmp_path / "whole")
    whole, resumed = (logged(each) for each in (made, run(tmp_path / "resumed", str(tmp_path / "whole/checkpoint-3"))))
    for name in ("d3s/rollouts_kept", "d3s/tokens_kept", "loss", "grad_norm"):
        assert resumed[-1][name] == pytest.approx(whole[-1][name], rel=1e-4), name
    assert [row["d3s/num_tokens_kept"] for row in resumed] == [row["d3s/num_tokens_kept"] for row in whole]
    assert len({row["d3s/rollouts_kept"] for row in whole}) > 2
    made.train()
    again = logged(made)
    assert again[0]["d3s/num_tokens_kept"] == 4 * again[0]["d3s/tokens_kept"] > 0  # of two steps, of two micro-batches


def test_a_run_in_a_set_up_that_the_sweep_does_not_draw_moves_the_model(saved: str) -> None:
    adapter = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    made = trainer(
        policy=saved, bf16=True, gradient_checkpointing=True, num_iterations=2, beta=0.1, peft_config=adapter
    )
    after = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in after]
    made.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    rows = [row for row in made.state.log_history if "loss" in row]
    assert len(rows) == made.args.max_steps
    for row in rows:
        assert 0 < row["grad_norm"] < float("inf")
        assert row["kl"] >= 0


@pytest.mark.parametrize("ours", [{}, {"sampling_mask": True}], ids=str)
def test_evaluates_as_trl_does(ours: dict[str, Any]) -> None:
    """Of all rollouts, with TRL's share of tokens, over the whole vocabulary; and nothing of ours is logged."""
    logs = []
    for kind, more in ((PlainTrainer, {}), (D3STrainer, ours)):
        data = Dataset.from_dict({"prompt": ["w2 w3", "w4 w5"]})
        made = trainer(kind, eval_dataset=data, top_p=0.9, top_entropy_quantile=0.25, **more)
        torch.manual_seed(1)
        logs.append({name: value for name, value in made.evaluate().items() if not name.endswith(("time", "_second"))})
        assert not made._metrics["train"]
    theirs, found = logs
    assert found.keys() == theirs.keys() >= {"eval_loss", "eval_entropy", "eval_reward"}
    assert found == pytest.approx(theirs, rel=1e-5)


def test_without_arguments_it_is_d3s(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCpu(integration.D3SConfig):
        def __init__(self, output_dir: str) -> None:
            super().__init__(str(tmp_path / output_dir), use_cpu=True, bf16=False, num_generations=2)

    monkeypatch.setattr(module, "D3SConfig", OnCpu)
    made = D3STrainer(saved, share_of_even, train_dataset=Dataset.from_dict({"prompt": ["w2"] * 8}))
    assert made.args.output_dir.endswith("-D3S")


# ---- which forwards it makes -----------------------------------------------------------------------------------------


def without_padding(inputs: dict[str, Tensor]) -> list[list[int]]:
    """The tokens of each row."""
    parts = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [row[present.bool()].tolist() for row, present in parts]


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 1),  # the update alone
        ({"num_iterations": 2, "beta": 0.1}, 3),  # the old policy, the reference, the update
        ({"entropy_from": "rollout"}, 2),  # whose update leaves rows and columns out
    ],
    ids=str,
)
def test_what_is_dropped_is_never_computed(
    options: dict[str, Any], passes: int, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rewards to the optimizer: dropped rollouts are in no forward, dropped tokens not in the head's backward."""
    made = trainer(policy=saved, max_steps=1, **options)
    kept_rows, kept_tokens, in_backward = [], [], []

    def log(_: Any, batch: Any, chosen: Any, *more: Any) -> None:
        kept_tokens.append(batch["completion_ids"][chosen.kept].tolist())

    looked_at(monkeypatch, made, "_keep_rollouts", lambda kept, *_: kept_rows.extend(without_padding(texts(kept))))
    looked_at(monkeypatch, made, "_log_tokens", log)
    looked_at(monkeypatch, backward, "_gradient_of_tile", lambda *call: in_backward.append(call[3].targets.tolist()))
    with forwards(made.model) as of_policy, forwards(made.ref_model or model()) as of_reference:
        made.train()
    assert len(kept_rows) == 8  # of 16
    scored = [row for _, inputs in of_policy + of_reference for row in without_padding(inputs)]
    assert len(scored) <= passes * len(kept_rows)
    assert len(scored) == passes * len(kept_rows) or "entropy_from" in options
    assert all(any(rollout[: len(row)] == row for rollout in kept_rows) for row in scored)
    assert in_backward == [tokens for tokens in kept_tokens if tokens] != []


def test_images_go_along() -> None:
    made = trainer()
    seen: dict[str, Any] = {}
    made._get_per_token_logps_and_entropies = lambda *_, **options: (seen.update(options), None, None)
    images = {"pixel_values": torch.ones(3, 2), "num_images": [1, 2], "image_sizes": torch.ones(3, 2)}
    made._score(made.model, generation_batch(1, rows=2) | images)
    assert images.keys() <= seen.keys()


def test_rollouts_without_advantage_are_not_scored_for_their_entropy() -> None:
    made = trainer(entropy_from="rollout")
    batch = generation_batch(3)
    with forwards(made.model) as policy:
        made._choose_tokens_of_batch(batch)
    assert [len(inputs["input_ids"]) for _, inputs in policy] == [GROUP]  # the other group has advantages of 0
    # The tokens of that group still count.
    assert batch["d3s_tokens_kept"] == -(-int(batch["completion_mask"].sum()) // 4)
    batch["advantages"] = torch.zeros(2 * GROUP)
    del batch["d3s_entropy"]
    with forwards(made.model) as policy:
        made._choose_tokens_of_batch(batch)
    assert policy == []


def test_all_tokens_are_scored_beside_images_or_a_router_loss() -> None:
    """Other terms that make tokens depend on each other: test_trl_sweep.py."""
    made, batch = trainer(), generation_batch(1)
    assert made._tokens_are_independent(batch)
    assert not made._tokens_are_independent(batch | {"num_images": [1] * len(batch["advantages"])})
    made.aux_loss_enabled = True
    assert not made._tokens_are_independent(batch)


def test_espos_clip_range_is_that_of_the_texts_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vision model has one configuration for each of its parts."""
    made, seen = trainer(importance_sampling_level="entropy_group", loss_type="grpo"), []
    made.model.config.get_text_config = lambda *_, **__: Qwen2Config(vocab_size=VOCABULARY**2)
    looked_at(monkeypatch, module, "as_espo", lambda _, *call: seen.append(call[4]))
    made.compute_loss(made.model, micro_batch(9))
    assert seen == [VOCABULARY**2]
    assert made.epsilon_low == made.epsilon_high == made.args.epsilon, "an evaluation reads them"
