"""Which rollouts of TRL's generation batch are kept, and what happens to its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from batches import generation_batch
from tiny_trl import GROUP, PAD, generated, trainer

from d3s_kernels.integrations._transformers import without_spread
from d3s_kernels.integrations.trl.batch import take
from d3s_kernels.integrations.trl.columns import MayCut, trimmed
from d3s_kernels.selection import Selection, choose_rollouts


def test_taken_rows_have_their_images() -> None:
    batch = generation_batch(0, rows=3)
    batch |= {
        "num_images": [2, 0, 1],
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1], [1, 2, 2]]),
        "pixel_values": torch.arange(7.0)[:, None],  # 3 patches of the first row, 4 of the last
    }
    taken = take(batch, torch.tensor([0, 2]))
    assert taken["num_images"] == [2, 1]
    assert taken["pixel_values"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    last = take(batch, torch.tensor([2]))
    assert last["pixel_values"].flatten().tolist() == [3, 4, 5, 6]
    assert last["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert torch.equal(last["completion_ids"], batch["completion_ids"][2:])
    assert last["num_items_in_batch"] is batch["num_items_in_batch"]


BY_TOKEN = [
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "d3s_entropy",
]  # fmt: skip


@pytest.mark.parametrize(("multiple", "prompt", "completion"), [(None, 2, 5), (4, 4, 8), (16, 4, 10)])
def test_trimmed_of_empty_columns(multiple: int | None, prompt: int, completion: int) -> None:
    numbers = torch.arange(160.0).view(16, 10)
    batch = generation_batch(0) | dict.fromkeys(BY_TOKEN, numbers)
    batch["completion_mask"] = (torch.arange(10) < 5).long().expand(16, 10).clone()
    batch["prompt_mask"] = (torch.arange(4) >= 2).long().expand(16, 4).clone()
    batch["token_type_ids"] = torch.cat([batch["prompt_ids"], numbers], dim=1)
    cut = trimmed(batch, multiple, MayCut(True, True))
    for name in ("prompt_ids", "prompt_mask"):
        assert torch.equal(cut[name], batch[name][:, 4 - prompt :])
    for name in BY_TOKEN:
        assert torch.equal(cut[name], batch[name][:, :completion])
    both = torch.cat([cut["prompt_ids"], numbers[:, :completion]], dim=1)
    assert torch.equal(cut["token_type_ids"], both)
    batch["importance_sampling_ratio"] = torch.ones(16, 1)  # of sequences
    assert trimmed(batch, multiple, MayCut(True, True))["importance_sampling_ratio"].shape == (16, 1)


@pytest.mark.parametrize(("there", "left"), [(10, 2), (1, 1)])
def test_trimmed_keeps_two_columns_of_nothing(there: int, left: int) -> None:
    batch = generation_batch(0, completion=there)
    batch["completion_mask"] *= 0
    assert trimmed(batch, None, MayCut(True, True))["completion_ids"].shape == (16, left)


@pytest.mark.parametrize("tools", [False, True])
def test_kept_rows_are_whole_and_in_their_order(tools: bool) -> None:
    made, batch = trainer(rollouts=3), generation_batch(5)
    batch["completion_mask"][:, :2] = 1
    counted = batch["completion_mask"].clone()
    if tools:  # whose tokens are not counted
        counted[:, 0] = 0
        batch["tool_mask"] = counted
    expected = choose_rollouts(batch["advantages"].view(-1, GROUP), 3, multiple_of=2).flatten()
    kept = made._keep_rollouts(dict(batch))
    assert expected.sum() == 6
    width = int(batch["completion_mask"][expected].sum(dim=1).max())
    prompt = int(batch["prompt_mask"][expected].sum(dim=1).max())
    assert torch.equal(kept["advantages"], batch["advantages"][expected])
    for name in ("prompt_ids", "prompt_mask"):
        assert torch.equal(kept[name], batch[name][expected][:, 4 - prompt :])
    for name in ("completion_ids", "completion_mask", *["tool_mask"] * tools):
        assert torch.equal(kept[name], batch[name][expected][:, :width])
    assert kept["num_items_in_batch"] == counted[expected].sum()
    assert (kept["completion_ids"][kept["completion_mask"] == 0] == PAD).all()


FOUR_STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


LITTLE: dict[str, dict[str, Any]] = {
    "_start: got 3, but 4 of 8 rollouts are kept: a group has 8, and .* multiple of .*, 4": {
        "rollouts": 3,
        **FOUR_STEPS,
    },
    "_start: got 12, but 16 of 16 rollouts are kept: a group has 8": {"rollouts": 12},
    "_end: got 5, but 8 of 8 rollouts are kept: a group has 8, and ": {"rollouts_end": 5, **FOUR_STEPS},
}


@pytest.mark.parametrize("message", LITTLE)
def test_little_to_drop_is_said(message: str) -> None:
    with pytest.warns(UserWarning, match=f"rollouts{message}"):
        trainer(**LITTLE[message])


def test_enough_to_drop_is_not_remarked_upon(recwarn: pytest.WarningsRecorder) -> None:
    trainer(rollouts_start=4, rollouts_end=8)
    trainer(rollouts_start=1, rollouts_end=1)  # a share of 1 asks for all of them
    assert not [warning for warning in recwarn if "rollouts_" in str(warning.message)]


def test_advantages_of_tokens_are_refused() -> None:
    batch = generation_batch(5)
    batch["advantages"] = batch["advantages"][:, None].expand(-1, 10)
    with pytest.raises(TypeError, match=r"advantages: got shape \[16, 10\]; takes one for each rollout, \[16\]"):
        trainer()._keep_rollouts(batch)


def test_podss_advantages_are_those_of_the_kept() -> None:
    batch = generation_batch(6)
    marked = choose_rollouts(batch["advantages"].view(-1, GROUP), 4, scope="group", multiple_of=2).flatten()
    left = batch["advantages"][marked].view(-1, 4)
    centred = left - left.mean(dim=1, keepdim=True)
    scaled = centred / (left.std(dim=1, keepdim=True) + 1e-4)
    # With "batch" TRL has divided already, and with "none" it does not divide.
    scales = {"group": scaled, "batch": centred, "none": centred}
    several = {"multi_objective_aggregation": "normalize_then_sum"}  # here TRL divides as with "batch"
    for options, expected in [*(({"scale_rewards": scale}, scales[scale]) for scale in scales), (several, centred)]:
        made = trainer(rollout_scope="group", advantages_from="kept", **options)
        torch.testing.assert_close(made._keep_rollouts(dict(batch))["advantages"].view(-1, 4), expected)
    whole = trainer(rollout_scope="group")._keep_rollouts(dict(batch))["advantages"]
    assert torch.equal(whole, batch["advantages"][marked])


def test_rounding_errors_of_equal_rewards_are_no_advantages() -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [0.1] * len(completions)

    assert generated(trainer(reward_funcs=reward, keep_all=True, rollouts=1.0, tokens=1.0))["advantages"].any(), (
        "GRPOTrainer's gradient"
    )
    made = trainer(reward_funcs=reward, drop_zeros=True, entropy_from="rollout")
    batch = generated(made)
    assert not batch["advantages"].any()
    assert not batch["d3s_kept"].any()


def test_rounding_errors_are_not_normalised() -> None:
    """TRL's advantages of rewards that are equal up to rounding are some 6e-4, and their deviation is as small."""
    a, b, c = torch.tensor([0.1, 0.2, 0.35])
    rewards = torch.stack([a + b + c, c + b + a]).repeat(GROUP // 2)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[None]
    assert advantages.abs().max() > 1e-4
    kept = torch.ones_like(advantages, dtype=torch.bool)
    same = without_spread(rewards[:, None], torch.ones(1), GROUP, separately=False)
    anew = Selection(advantages_from="kept").advantages(advantages, kept, without_spread=same)
    assert not anew.any()


def test_only_groups_with_a_share_of_the_variance() -> None:
    """The variance is of the total rewards of all functions, and no budget keeps the rollouts of other groups."""
    made, batch = trainer(rollouts=1.0, group_variance_mass=0.9), generation_batch(5)
    with pytest.raises(ValueError, match="rewards: got None with group_variance_mass"):
        made._keep_rollouts(dict(batch))
    apart = torch.linspace(-1, 1, GROUP)
    rewards = torch.stack([torch.cat([apart, apart]), torch.cat([-apart, apart])], dim=1)
    kept = made._keep_rollouts(dict(batch), rewards)
    assert torch.equal(kept["advantages"], batch["advantages"][GROUP:])
    assert torch.equal(kept["prompt_ids"], batch["prompt_ids"][GROUP:, -kept["prompt_ids"].shape[1] :])
    logged = made._metrics["train"]
    assert [float(logged[f"d3s/{name}"][0]) for name in ("groups_kept", "rollouts_kept")] == [0.5, GROUP]
