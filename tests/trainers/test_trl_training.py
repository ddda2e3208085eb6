"""Whole training runs with D3STrainer in TRL's set-ups, and which forwards it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import forwards, generation_batch, looked_at, texts
from datasets import Dataset
from peft import LoraConfig
from tiny_trl import GROUP, PlainTrainer, generated, model, share_of_even, trainer

from d3s_kernels._lm_head import backward
from d3s_kernels.integrations import trl as integration
from d3s_kernels.integrations.trl import D3STrainer
from d3s_kernels.integrations.trl import trainer as module
from d3s_kernels.integrations.trl.step import Generating, Passes
from d3s_kernels.selection.metrics import NAMES, PADDING_NAMES

LOGGED = {*NAMES, *PADDING_NAMES, "d3s/num_tokens_kept", "d3s/updates_without_tokens"} - {"d3s/flops_saved"}


def test_a_resumed_run_goes_on_where_it_was(saved: str, tmp_path: Path) -> None:
    def run(folder: Path, resume: str | None = None) -> list[dict[str, float]]:
        made = trainer(
            policy=saved, output_dir=str(folder), save_strategy="steps", save_steps=2, max_steps=4, rollouts_start=2,
            rollouts_end=8,
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return [row for row in made.state.log_history if "loss" in row]

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    for name in ("d3s/rollouts_kept", "d3s/tokens_kept", "d3s/num_tokens_kept", "loss", "grad_norm"):
        assert [row[name] for row in resumed] == pytest.approx([row[name] for row in whole], rel=1e-4), name
    assert len({row["d3s/rollouts_kept"] for row in whole}) > 2


def test_the_count_of_tokens_is_that_of_the_run(saved: str, tmp_path: Path) -> None:
    """Also after a checkpoint between two logs, and in a second run of the same trainer."""
    options: dict[str, Any] = {"policy": saved, "max_steps": 3, "logging_steps": 3}

    def counted(made: Any) -> float:
        return next(row["d3s/num_tokens_kept"] for row in made.state.log_history if "d3s/num_tokens_kept" in row)

    made = trainer(output_dir=str(tmp_path), save_strategy="steps", save_steps=2, **options)
    tokens, log = [], made._log_tokens
    made._log_tokens = lambda batch, chosen, *more: tokens.append(int(chosen.kept.sum())) or log(batch, chosen, *more)
    made.train()
    assert counted(made) == sum(tokens) > 0
    resumed = trainer(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert counted(resumed) == sum(tokens)
    tokens.clear()
    made.train()
    assert counted(made) == sum(tokens) > 0


def test_an_update_in_which_no_token_is_kept_is_counted() -> None:
    """Of a generation batch one token is kept, and it is trained on in two updates of two micro-batches."""
    made = trainer(tokens=1e-4, steps_per_generation=4, logging_steps=2)
    made.train()
    row = next(row for row in made.state.log_history if "loss" in row)
    assert row["d3s/num_tokens_kept"] == 1
    assert row["d3s/updates_without_tokens"] == 0.5


def adapter(**options: Any) -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True}, {"gradient_checkpointing": True}, {"num_iterations": 2, "peft_config": adapter()},
        {"num_iterations": 2, "peft_config": adapter(modules_to_save=["lm_head"]), "beta": 0.1},
    ],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_a_run_in_a_set_up_that_the_sweep_does_not_draw_moves_the_model(options: dict[str, Any], saved: str) -> None:
    """The other options: test_trl_sweep.py."""
    made = trainer(policy=saved if "beta" in options else None, **options)
    after = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in after]
    made.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    rows = [row for row in made.state.log_history if "loss" in row]
    assert len(rows) == made.args.max_steps
    assert {name for name in rows[0] if name.startswith("d3s/")} == LOGGED
    for row in rows:
        assert 0 < row["grad_norm"] < float("inf")
        assert ("kl" in row) == ("beta" in options)


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


def rows(seen: list[tuple[bool, dict[str, Any]]]) -> list[tuple[bool, int]]:
    """Of each forward: whether it has a gradient, and the number of rows."""
    return [(has_gradient, len(inputs["input_ids"])) for has_gradient, inputs in seen]


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
    made_rows, kept_rows, kept_tokens, in_backward, valid = [], [], [], [], []

    def keep(kept: Any, batch: Any, _: Any) -> None:
        made_rows.extend(without_padding(texts(batch)))
        kept_rows.extend(without_padding(texts(kept)))

    def log(_: Any, batch: Any, chosen: Any, mask: Tensor, *more: Any) -> None:
        kept_tokens.append(batch["completion_ids"][chosen.kept].tolist())
        valid.append(int(mask.sum()))

    looked_at(monkeypatch, made, "_keep_rollouts", keep)
    looked_at(monkeypatch, made, "_log_tokens", log)
    looked_at(monkeypatch, backward, "_gradient_of_tile", lambda *call: in_backward.append(call[3].targets.tolist()))
    with forwards(made.model) as of_policy, forwards(made.ref_model or model()) as of_reference:
        made.train()
    dropped = [rollout for rollout in made_rows if rollout not in kept_rows]
    assert (len(kept_rows), len(dropped)) == (8, 8)
    scored = [row for _, inputs in of_policy + of_reference for row in without_padding(inputs)]
    assert len(scored) <= passes * len(kept_rows)
    assert len(scored) == passes * len(kept_rows) or "entropy_from" in options
    assert all(any(rollout[: len(row)] == row for rollout in kept_rows) for row in scored)
    assert in_backward == [tokens for tokens in kept_tokens if tokens]
    assert 0 < sum(map(len, kept_tokens)) < 0.35 * sum(valid)


def test_nor_does_it_with_an_adapter_switched_off_as_the_reference(saved: str) -> None:
    made = trainer(policy=saved, peft_config=adapter(init_lora_weights=False), max_steps=1, beta=0.1)
    with forwards(made.model.get_base_model()) as policy:
        batch = generated(made)
    assert rows(policy) == [(False, GROUP)]
    with made.model.disable_adapter():
        without = made._score(made.model, batch)[0]
    mask = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["ref_per_token_logps"][mask], without[mask])
    assert not torch.allclose(made._score(made.model, batch)[0][mask], without[mask])


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
    assert rows(policy) == [(False, GROUP)]  # the other group has advantages of 0
    # The tokens of that group still count.
    assert batch["d3s_tokens_kept"] == -(-int(batch["completion_mask"].sum()) // 4)
    batch["advantages"] = torch.zeros(2 * GROUP)
    del batch["d3s_entropy"]
    with forwards(made.model) as policy:
        made._choose_tokens_of_batch(batch)
    assert policy == []


def test_postponed_passes_give_what_trls_do(saved: str) -> None:
    """With all rollouts kept, the batch is TRL's own, including its old and reference log-probabilities."""
    options: dict[str, Any] = {"num_iterations": 2, "beta": 0.1}
    batches: list[dict[str, Tensor]] = []
    for kind in (PlainTrainer, D3STrainer):
        made = trainer(kind, policy=saved, **options, rollouts=GROUP)
        torch.manual_seed(5)
        batches.append(generated(made))
    theirs, ours = batches
    assert {"old_per_token_logps", "ref_per_token_logps"} <= set(theirs)
    for name, value in theirs.items():
        mask = theirs["completion_mask"].bool() if name.endswith("logps") else torch.tensor(True)
        torch.testing.assert_close(torch.where(mask, ours[name], 0), torch.where(mask, value, 0), msg=name)


def test_auto_takes_the_entropy_of_the_old_policys_pass(saved: str) -> None:
    made = trainer(policy=saved, num_iterations=2)
    with forwards(made.model) as policy:
        batch = generated(made)
    assert sum(count for _, count in rows(policy)) == len(batch["advantages"])  # one pass serves both
    valid = int(batch["completion_mask"].sum())
    assert int(batch["d3s_kept"].sum()) == -(-valid // 4)
    assert batch["d3s_threshold"] > 0


def test_vllms_correction_needs_the_old_policy_at_once() -> None:
    """The pass is not postponed, and its entropies choose the tokens. The test does not need vLLM itself."""
    made = trainer()
    made.use_vllm = True
    assert made.vllm_importance_sampling_correction
    assert made._pass_names() == ["old_per_token_logps"]
    passes, batch = Passes(made._pass_names()), generation_batch(4)
    with made._within(Generating(passes)):
        logprob = made._score(made.model, batch)[0]
    expected, entropy, _ = made._score(made.model, batch, compute_entropy=True)
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(passes.entropy, entropy)
    assert passes.postponed == {}
