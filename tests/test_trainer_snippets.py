"""The snippets of docs/trainers.md do what the page says, on inputs with the layout that each trainer's hook passes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels._rules.equal_rows import most_varied

PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SNIPPETS: dict[str, Any] = {}
for block in BLOCKS:
    exec(compile(block, str(PAGE), "exec"), SNIPPETS)

GROUPS, GROUP, KEEP, RATIO = 4, 6, 2, 0.25


@contextmanager
def choosing() -> Iterator[None]:
    """The snippets choose with other numbers than the page's."""
    ends = {"rollouts_start": KEEP, "rollouts_end": KEEP, "token_ratio_start": RATIO, "token_ratio_end": RATIO}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SNIPPETS, "selection", d3s.Selection(**ends))
        yield


@pytest.fixture(autouse=True)
def few() -> Iterator[None]:
    with choosing():
        yield


def test_every_snippet_is_tested_here_and_has_short_lines() -> None:
    defined = set(re.findall(r"^def (\w+)", "\n".join(BLOCKS), re.MULTILINE))
    source = Path(__file__).read_text(encoding="utf-8")
    assert defined == set(re.findall(r'SNIPPETS\["(\w+)"\]', source))
    assert [line for block in BLOCKS for line in block.splitlines() if len(line) > 120] == []


# ---- expected results ------------------------------------------------------------------------------------------------


def rewards_of_groups() -> Tensor:
    """Distinct rewards whose spread differs between groups, with none in the first: pooling decides."""
    return torch.randn(GROUPS, GROUP) * torch.arange(GROUPS).unsqueeze(1) + torch.randn(GROUPS, 1)


def check_gradient(result: Tensor, logprob: Tensor, with_gradient: Tensor) -> None:
    """The result has the values of `logprob`, and a gradient for the marked tokens only."""
    torch.testing.assert_close(result, logprob, rtol=0, atol=0)
    weights = torch.rand(result.shape) + 1
    (gradient,) = torch.autograd.grad((result * weights).sum(), logprob)
    torch.testing.assert_close(gradient, weights * with_gradient, rtol=0, atol=0)


def expected_tokens(entropy: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Tensor:
    kept = reference.select_tokens(entropy.detach(), advantages, RATIO, mask=mask.bool(), **options).mask
    assert 0 < kept.sum() < mask.sum()
    return kept


def padded(rows: int, width: int) -> dict[str, Tensor]:
    """Right-padded [rows, width] tensors. Padding and masked tokens have the highest entropy."""
    mask = torch.arange(width) < torch.randint(width // 2, width, (rows, 1))
    return {
        "logprob": torch.randn(rows, width, requires_grad=True),
        "entropy": torch.where(mask, torch.rand(rows, width) + 0.1, 99.0).requires_grad_(),
        "advantages": torch.randn(rows, 1).expand(rows, width).contiguous(),
        "mask": mask,
    }


def grpo_loss_fn(logprobs: Tensor, entropy: Tensor, input_data: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """AReaL's; its options are keywords."""
    return logprobs, entropy, input_data, options


@choosing()
def tokens_rank(ranks: Ranks, seed: int) -> None:
    """Each rank has some rows of one step's micro-batches, padded and packed as in AReaL; one share for all ranks."""
    for number in range(4):
        torch.manual_seed(seed + number)  # the same on all ranks
        t = padded(6, 20)
        kept = expected_tokens(t["entropy"], t["advantages"], t["mask"])
        begin, end = (0, 2) if ranks.rank == 0 else (2, 6)
        own = {name: value.detach()[begin:end].clone() for name, value in t.items()}
        own["logprob"].requires_grad_()
        result = SNIPPETS["keep_tokens"](*own.values(), process_group=ranks.group)
        check_gradient(result, own["logprob"], kept[begin:end])
        before_update = own["entropy"], own["advantages"], own["mask"]
        masks = SNIPPETS["masks_of_micro_batches"](*before_update, 2, process_group=ranks.group)
        assert [mask.equal(part) for mask, part in zip(masks, kept[begin:end].chunk(2), strict=True)] == [True] * 2

        lengths = own["mask"].sum(1)
        packed = {name: value.detach()[own["mask"]] for name, value in own.items()}
        packed["logprob"].requires_grad_()
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        input_data = {"advantages": packed["advantages"], "loss_mask": packed["mask"].float(), "cu_seqlens": offsets}
        if number % 2:
            del input_data["cu_seqlens"]  # AReaL has none with ``enable_tree_training``
        before, loss_fn = dict(input_data), SNIPPETS["areal_loss"](grpo_loss_fn, process_group=ranks.group)
        result, *others = loss_fn(packed["logprob"], packed["entropy"], input_data, eps_clip=0.2)
        assert others == [packed["entropy"], before, {"eps_clip": 0.2}]
        check_gradient(result, packed["logprob"], kept[begin:end][own["mask"]])


def test_tokens_are_chosen_from_all_ranks_padded_and_packed() -> None:
    world(2).run(tokens_rank, int(torch.randint(2**31, ())))


# ---- AReaL -----------------------------------------------------------------------------------------------------------


def areal_data(rewards: Tensor) -> list[dict[str, Any]]:
    """A dictionary for each prompt; its ``table`` does not have one row for each rollout."""
    return [
        {
            "rewards": row, "input_ids": torch.randint(9, (GROUP, 5 + g)), "loss_mask": torch.rand(GROUP, 5 + g),
            "rl_loss_weight": 0.5, "images": ["a"], "table": torch.rand(GROUP + 1, 3),
        }
        for g, row in enumerate(rewards)
    ]  # fmt: skip


def areal_rank(ranks: Ranks, seed: int) -> None:
    """Each rank has half of the prompts, and both halves keep the same number of rollouts."""
    torch.manual_seed(seed)  # the same on all ranks
    rewards = rewards_of_groups()
    rewards[0] = 1.0  # their advantages of 0 are not among the extremes, so this prompt keeps none
    advantages = reference.group_advantages(rewards).float().view(ranks.size, -1)
    kept = most_varied(advantages, torch.tensor(KEEP * GROUPS)).view(ranks.size, -1, GROUP)[ranks.rank]
    assert kept.sum() == KEEP * GROUPS // ranks.size
    data = areal_data(rewards.chunk(ranks.size)[ranks.rank])
    before = [dict(group) for group in data]
    smaller = SNIPPETS["areal_drop_rollouts"](data, KEEP, process_group=ranks.group)
    pairs = [(group, rows) for group, rows in zip(data, kept, strict=True) if rows.any()]
    assert len(smaller) == len(pairs) == len(data) - (ranks.rank == 0)
    for new, (old, rows) in zip(smaller, pairs, strict=True):
        assert list(new) == list(old)
        assert all(torch.equal(new[name], old[name][rows]) for name in ("rewards", "input_ids", "loss_mask"))
        assert all(new[name] is old[name] for name in ("rl_loss_weight", "images", "table"))
    assert all(untouched[name] is old[name] for old, untouched in zip(before, data, strict=True) for name in old)


def test_areal_rollouts_of_all_ranks() -> None:
    world(2).run(areal_rank, int(torch.randint(2**31, ())))


# ---- SkyRL -----------------------------------------------------------------------------------------------------------


class TrainingInputBatch(dict[str, Any]):
    """A dictionary of [B, ...] tensors, lists of tensors and None, with metadata beside it."""

    metadata: dict[str, Any] | None = None


class TensorList(list[Tensor]):
    def __getitem__(self, index: list[int]) -> "TensorList":
        return TensorList([list.__getitem__(self, i) for i in index])


def test_skyrl_rollouts() -> None:
    rewards, width, padding = rewards_of_groups(), 5, 3
    rewards[0], rewards[1] = 1.0, torch.tensor([0.0, 1.0, 2.0, 7.0, 8.0, 9.0])  # so the first prompt keeps no rollout
    rows, half = GROUPS * GROUP, GROUPS * GROUP // 2
    per_token = torch.zeros(rows + padding, width)
    per_token[:rows, 2] = rewards.flatten()
    per_token[rows:, 2] = 1e3  # rows that pad the batch to the number of ranks
    data = TrainingInputBatch(
        rewards=per_token,
        sequences=torch.arange(rows + padding).unsqueeze(1).expand(-1, 9),
        advantages=torch.randn(rows + padding, width),
        pixel_values=TensorList([torch.full((1, 2), i) for i in range(rows + padding)]),
        values=None,
    )
    data.metadata = {
        "policy_mini_batch_boundaries": [(0, half), (half, rows)], "response_length": width,
        "policy_prompt_boundaries": [(g * GROUP, (g + 1) * GROUP) for g in range(GROUPS)],
    }  # fmt: skip
    before, metadata = dict(data), dict(data.metadata)
    smaller = SNIPPETS["skyrl_drop_rollouts"](data, GROUP)
    assert all(data[name] is before[name] for name in before)
    assert data.metadata == metadata
    advantages = reference.group_advantages(rewards)
    kept = reference.max_variance_select(advantages.view(2, half), KEEP * GROUPS // 2).flatten()
    chosen = kept.nonzero().flatten()
    assert type(smaller) is TrainingInputBatch
    assert list(smaller) == list(data)
    for name in ("rewards", "sequences", "advantages"):
        assert torch.equal(smaller[name], data[name][chosen])
    assert [int(t[0, 0]) for t in list(smaller["pixel_values"])] == chosen.tolist()
    assert smaller["values"] is None
    each = KEEP * GROUPS // 2
    assert smaller.metadata["policy_mini_batch_boundaries"] == [(0, each), (each, 2 * each)]
    prompts = [chosen[begin:end] // GROUP for begin, end in smaller.metadata["policy_prompt_boundaries"]]
    of_prompts = [{g} for g in range(GROUPS) if kept.view(GROUPS, GROUP)[g].any()]
    assert {0} not in of_prompts
    assert [set(prompt.tolist()) for prompt in prompts] == of_prompts  # SkyRL divides by the number of bounds
    assert sum(map(len, prompts)) == len(chosen)
    assert smaller.metadata["response_length"] == width


def test_skyrl_tokens() -> None:
    t = padded(4, 11)
    edge = torch.full((4, 1), 50.0)
    output = {"entropy": torch.cat([edge.expand(-1, 6), t["entropy"], edge], 1)}  # [B, S], for the next token
    mask = t["mask"].float()
    result = SNIPPETS["skyrl_tokens"](t["logprob"], output, 11, t["advantages"], mask)
    check_gradient(result, t["logprob"], expected_tokens(t["entropy"], t["advantages"], t["mask"]))


# ---- open-instruct ---------------------------------------------------------------------------------------------------


def test_open_instruct_rollouts() -> None:
    advantages = rewards_of_groups().double().numpy().flatten()
    n = len(advantages)
    queries, responses, masks, logprobs = ([[i, number] for i in range(n)] for number in range(4))
    batch = SimpleNamespace(queries=queries)
    result = SimpleNamespace(responses=responses, masks=masks, logprobs=logprobs)
    values, columns = SNIPPETS["open_instruct_rollouts"](advantages, batch, result, GROUP)
    kept = reference.select_rollouts(torch.tensor(advantages, dtype=torch.float32).view(-1, GROUP), KEEP).flatten()
    rows = kept.nonzero().flatten().tolist()
    assert len(rows) == KEEP * GROUPS
    assert isinstance(values, np.ndarray)
    assert values.tolist() == advantages[rows].tolist()
    names = ("queries", "responses", "masks", "vllm_logprobs")
    assert columns == {name: [[i, number] for i in rows] for number, name in enumerate(names)}
    assert len(batch.queries) == len(result.responses) == len(result.masks) == len(result.logprobs) == n


def test_open_instruct_tokens() -> None:
    packs, length = 2, 30
    advantages, masks = torch.randn(3, packs, length), torch.rand(3, packs, length) < 0.6
    data = SimpleNamespace(advantages=list(advantages), response_masks=list(masks))
    logprob, entropy = torch.randn(packs, length - 1, requires_grad=True), torch.rand(packs, length - 1) + 0.1
    result = SNIPPETS["open_instruct_tokens"](logprob, entropy, data, 1)
    check_gradient(result, logprob, expected_tokens(entropy, advantages[1][:, 1:], masks[1][:, 1:]))
