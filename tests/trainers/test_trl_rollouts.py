"""Which rollouts of TRL's generation batch are kept, and what becomes of its tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("trl")
from tiny_trl import GROUP, PAD, generation_batch, trainer

from d3s_kernels import max_variance_select
from d3s_kernels.integrations.trl.rollouts import choose_rollouts, take, trimmed


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Advantages of groups, a budget, and a multiple that divides the batch."""
    groups, size = draw(st.integers(1, 6)), draw(st.integers(2, 9))
    values = st.sampled_from([-1.5, -0.5, 0.0, 0.0, 0.25, 2.0])
    advantages = draw(st.lists(values, min_size=groups * size, max_size=groups * size))
    divisors = [m for m in range(1, groups * size + 1) if groups * size % m == 0]
    return torch.tensor(advantages).view(groups, size), draw(st.integers(1, size + 2)), draw(st.sampled_from(divisors))


@given(batches(), st.sampled_from(["batch", "group"]))
def test_the_budget_is_clamped_and_rounded_up(batch: tuple[Tensor, int, int], scope: str) -> None:
    advantages, keep, multiple = batch
    groups, size = advantages.shape
    kept = choose_rollouts(advantages, keep, scope, multiple).view(groups, size)
    asked = groups * min(max(keep, 2), size)
    assert kept.sum() % multiple == 0
    assert asked <= kept.sum() < asked + multiple or kept.all()
    if scope == "group":
        counts = kept.sum(dim=1)
        assert counts.max() - counts.min() <= 1


@given(batches())
def test_of_the_batch_no_other_choice_varies_more(batch: tuple[Tensor, int, int]) -> None:
    advantages, keep, multiple = batch
    values = advantages.flatten().double()
    kept = choose_rollouts(advantages, keep, "batch", multiple)
    k = int(kept.sum())
    order = values.sort().values
    best = max(torch.cat([order[:i], order[len(order) - k + i :]]).var(correction=0) for i in range(k + 1))
    assert values[kept].var(correction=0) >= best - 1e-12


@given(batches())
def test_of_groups_those_with_the_widest_spread_get_one_more(batch: tuple[Tensor, int, int]) -> None:
    advantages, keep, multiple = batch
    kept = choose_rollouts(advantages, keep, "group", multiple).view(advantages.shape)
    counts, spreads = kept.sum(dim=1), advantages.var(dim=1)
    for a, b in itertools.permutations(range(len(counts)), 2):
        if counts[a] > counts[b]:
            assert spreads[a] >= spreads[b]
    for group, chosen, count in zip(advantages, kept, counts, strict=True):
        assert torch.equal(chosen, max_variance_select(group, int(count)))


def test_rollouts_that_cannot_move_are_chosen_on_their_rank() -> None:
    advantages = torch.tensor([[9.0, -9.0, 8.0, -8.0], [0.1, 0.0, 0.0, -0.1]])
    anywhere = choose_rollouts(advantages, 2, "batch", multiple=2)
    assert anywhere.view(2, 4).sum(dim=1).tolist() == [4, 0]
    by_rank = choose_rollouts(advantages, 2, "batch", multiple=2, ranks=2)
    assert by_rank.view(2, 4).tolist() == [[True, True, False, False], [True, False, False, True]]


def test_taken_rows_have_their_images() -> None:
    batch = generation_batch(0, rows=3)
    batch |= {
        "num_images": [2, 0, 1],
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1], [1, 2, 2]]),
        "pixel_values": torch.arange(7.0)[:, None],  # 2 + 1 patches of the first row, 4 of the last
    }
    taken = take(batch, torch.tensor([0, 2]))
    assert taken["num_images"] == [2, 1]
    assert taken["pixel_values"].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    last = take(batch, torch.tensor([2]))
    assert last["pixel_values"].flatten().tolist() == [3, 4, 5, 6]
    assert last["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert torch.equal(last["completion_ids"], batch["completion_ids"][2:])
    assert last["num_items_in_batch"] is batch["num_items_in_batch"]


@pytest.mark.parametrize(("multiple", "columns"), [(None, 5), (4, 8), (16, 10)])
def test_trimmed_of_empty_columns(multiple: int | None, columns: int) -> None:
    batch = generation_batch(0)
    batch["completion_mask"] = (torch.arange(10) < 5).long().expand(16, 10).clone()
    batch["token_type_ids"] = torch.ones(16, 14)
    batch["importance_sampling_ratio"] = torch.ones(16, 1)  # of sequences: no columns to cut
    cut = trimmed(batch, multiple)
    assert cut["completion_ids"].shape == cut["completion_mask"].shape == (16, columns)
    assert cut["token_type_ids"].shape == (16, 4 + columns)
    assert cut["importance_sampling_ratio"].shape == (16, 1)
    assert torch.equal(cut["prompt_ids"], batch["prompt_ids"])


def test_trimmed_keeps_one_column_of_nothing() -> None:
    batch = generation_batch(0)
    batch["completion_mask"] *= 0
    assert trimmed(batch, None)["completion_ids"].shape == (16, 1)


def test_kept_rows_are_whole_and_in_their_order() -> None:
    made = trainer(rollouts_start=3, rollouts_end=3)
    batch = generation_batch(5)
    expected = choose_rollouts(batch["advantages"].view(-1, GROUP), 3, "batch", multiple=2)
    kept = made._keep_rollouts(dict(batch))
    assert expected.sum() == 6
    width = kept["completion_ids"].shape[1]
    for name in ("prompt_ids", "prompt_mask", "advantages"):
        assert torch.equal(kept[name], batch[name][expected])
    for name in ("completion_ids", "completion_mask"):
        assert torch.equal(kept[name], batch[name][expected][:, :width])
    assert not batch["completion_mask"][expected][:, width:].any()
    assert kept["num_items_in_batch"] == batch["completion_mask"][expected].sum()
    assert (kept["completion_ids"][kept["completion_mask"] == 0] == PAD).all()


def test_podss_advantages_are_those_of_the_kept() -> None:
    batch = generation_batch(6)
    kept = trainer(rollout_scope="group", advantages_from="kept")._keep_rollouts(dict(batch))
    marked = choose_rollouts(batch["advantages"].view(-1, GROUP), 4, "group", multiple=2).view(-1, GROUP)
    for group, chosen, ours in zip(
        batch["advantages"].view(-1, GROUP), marked, kept["advantages"].view(-1, 4), strict=True
    ):
        left = group[chosen]
        torch.testing.assert_close(ours, (left - left.mean()) / (left.std() + 1e-4))
    assert kept["advantages"].view(-1, 4).mean(dim=1).abs().max() < 1e-6
    whole = trainer(rollout_scope="group")._keep_rollouts(dict(batch))["advantages"]
    assert torch.equal(whole, batch["advantages"][marked.flatten()])


def test_the_schedule_moves_the_budget() -> None:
    made = trainer(rollouts_start=2, rollouts_end=8, token_ratio_start=0.1, token_ratio_end=0.5, max_steps=10)
    sizes = []
    for step in (0, 5, 10):
        made.state.global_step = step
        sizes.append((len(made._keep_rollouts(generation_batch(7))["advantages"]), made._budget().token_ratio))
    assert sizes == [(4, 0.1), (10, pytest.approx(0.3)), (16, 0.5)]
    assert made._metrics["train"]["d3s/rollouts_kept"] == [4, 10, 16]
    assert made._metrics["train"]["d3s/zero_advantage"] == [0.5] * 3
    first, middle, last = made._metrics["train"]["d3s/zero_advantage_kept"]
    assert first == 0 < middle < last == 0.5
