"""Rows of TRL's generation batch move between processes, for any widths and any number of kept rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_generator, rounds
from ranks import Ranks, world
from torch import Tensor
from traffic import counted

pytest.importorskip("trl")
from d3s_kernels.integrations.trl.batch import SETS, keep_rollouts

SIZE = 3
ROUNDS = rounds(60)
PAD_TOKEN = 7  # not 0, with which all else is padded
BY_COMPLETION = {
    "completion_ids": torch.int64, "completion_mask": torch.int64, "tool_mask": torch.int64,
    "old_per_token_logps": torch.float32, "ref_per_token_logps": torch.bfloat16,
    "sampling_per_token_logps": torch.float32, "d3s_entropy": torch.float32,
}  # fmt: skip


def numbers(rows: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers that differ from every padding value."""
    return torch.randint(10, 100, (rows, width), generator=generator).to(dtype)


def draw_batch(rows: int, of_sequences: bool, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of random widths. All ranks agree on whether it has ratios of sequences."""
    prompt, completion = torch.randint(1, 6, (2,), generator=generator).tolist()
    batch = {name: numbers(rows, completion, dtype, generator) for name, dtype in BY_COMPLETION.items()}
    batch |= {name: numbers(rows, prompt, torch.int64, generator) for name in ("prompt_ids", "prompt_mask")}
    ratios = numbers(rows, 1 if of_sequences else completion, torch.float32, generator)
    width = int(torch.randint(1, 5, (), generator=generator))
    return batch | {
        SETS: numbers(rows, completion * width, torch.int32, generator).view(rows, completion, width),
        "importance_sampling_ratio": ratios,
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": torch.tensor(rows),
    }


def draw_kept(ranks: int, rows: int, generator: torch.Generator) -> Tensor:
    """bool ``[ranks, rows]``. The total is a multiple of the ranks; often a rank keeps none, or all of its rows."""
    share = torch.rand(ranks, 1, generator=generator) * 2 - 0.5
    kept = torch.rand(ranks, rows, generator=generator) < share
    surplus = int(kept.sum()) % ranks
    kept.view(-1)[kept.view(-1).nonzero()[:surplus, 0]] = False
    return kept


def rows_of(batch: dict[str, Tensor], kept: Tensor) -> list[dict[str, Any]]:
    return [
        {name: value[row].tolist() for name, value in batch.items() if value.dim()}
        for row in kept.nonzero()[:, 0].tolist()
    ]


def padded(row: list[Any], name: str, widths: list[int]) -> list[Any]:
    width, *more = widths
    if more:  # sets, which are padded too
        row = [padded(one, name, more) for one in row]
        return row + [[-1] * more[0]] * (width - len(row))
    if name == SETS:
        return row + [-1] * (width - len(row))
    filler = [{"prompt_ids": PAD_TOKEN, "completion_ids": PAD_TOKEN, "importance_sampling_ratio": 1}.get(name, 0)]
    missing = filler * (width - len(row))
    return missing + row if name.startswith("prompt") else row + missing


def expected(batches: list[dict[str, Tensor]], kept: Tensor) -> list[list[dict[str, Any]]]:
    """Each rank's rows: its own first ones, then the surplus rows of other ranks, in their order."""
    held = [rows_of(batch, own) for batch, own in zip(batches, kept, strict=True)]
    quota = sum(map(len, held)) // len(held)
    if all(len(rows) == quota for rows in held):
        return held  # nothing is padded
    widest = {
        name: [max(b[name].shape[dim] for b in batches) for dim in range(1, value.dim())]
        for name, value in batches[0].items()
        if value.dim() > 1
    }
    surplus = [row for rows in held for row in rows[quota:]]
    given = [rows[:quota] for rows in held]
    for rows in given:
        missing = quota - len(rows)
        rows += surplus[:missing]
        del surplus[:missing]
    return [
        [{n: padded(v, n, widest[n]) if n in widest else v for n, v in row.items()} for row in rows] for rows in given
    ]


def move(ranks: Ranks, seed: int, watch: bool) -> tuple[int, int]:
    """How often rows moved, and how often a rank that had kept none received rows."""
    moves = from_nothing = 0
    for number in range(ROUNDS):
        generator = random_generator(seed + number)
        rows = int(torch.randint(1, 7, (), generator=generator))
        batches = [draw_batch(rows, number % 2 == 0, generator) for _ in range(ranks.size)]
        kept = draw_kept(ranks.size, rows, generator)
        own = batches[ranks.rank]
        with counted() as calls:
            found = keep_rollouts(own, kept[ranks.rank], PAD_TOKEN, ranks.group)
        here = expected(batches, kept)[ranks.rank]
        all_rows = torch.ones(len(found["advantages"]), dtype=torch.bool)
        assert rows_of(found, all_rows) == here, f"seed {seed + number}"
        assert found.keys() == own.keys()
        assert all(found[name].dtype == value.dtype for name, value in own.items())
        assert found["num_items_in_batch"] is own["num_items_in_batch"]
        counts = kept.sum(dim=1)
        moved = bool((counts != counts[0]).any())
        moves += moved
        from_nothing += moved and int(counts.min()) == 0
        if watch:  # ranks send a number of rows, the widths, and then all columns of the leaving rows at once
            widths = sum(value.dim() - 1 for value in own.values() if value.dim())
            row = sum(value[:1].numel() * value.element_size() for value in found.values() if value.dim())
            leaving = max(0, int(counts[ranks.rank]) - len(found["advantages"]))
            assert [size for _, size in calls] == [8, *[8 * widths, leaving * row] * moved]
            assert ["alltoall" in name for name, _ in calls] == [False, *[False, True] * moved]
    return moves, from_nothing


def test_rows_move_by_one_all_to_all_and_become_as_wide_as_the_widest() -> None:
    for moves, from_nothing in world(SIZE).run(move, int(torch.randint(2**31, ())), True):
        assert 0 < moves < ROUNDS
        assert from_nothing > 0


def test_ranks_agree_on_what_travels() -> None:
    """Ranks compare the columns' names, dtypes and widths, but only with D3S_KERNELS_CHECK."""
    world(SIZE).run(move, int(torch.randint(2**31, ())), False, D3S_KERNELS_CHECK="1")


def with_images(ranks: Ranks) -> dict[str, Any]:
    own = draw_batch(3, False, random_generator(ranks.rank)) | {
        "num_images": [1, 0, 2],
        "pixel_values": torch.arange(3.0)[:, None] + 10 * ranks.rank,
        "image_grid_thw": torch.tensor([[1, 1, 1]] * 3),
    }
    if ranks.rank:
        del own["num_images"], own["pixel_values"], own["image_grid_thw"]
    kept = torch.tensor([ranks.rank == 0, True, ranks.rank > 0])
    return keep_rollouts(own, kept, PAD_TOKEN, ranks.group)


def test_where_as_many_are_kept_images_stay_with_their_rows() -> None:
    first, second, third = world(SIZE).run(with_images)
    assert first["num_images"] == [1, 0]
    assert first["pixel_values"].flatten().tolist() == [0]
    assert second["prompt_ids"].shape[0] == third["prompt_ids"].shape[0] == 2
    assert "num_images" not in second
