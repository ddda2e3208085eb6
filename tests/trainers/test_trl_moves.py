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
PAD_TOKEN = 7  # not 0, with which most is padded
FILLERS = {"prompt_ids": PAD_TOKEN, "completion_ids": PAD_TOKEN, "importance_sampling_ratio": 1, SETS: -1}
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


def widened(values: Tensor, name: str, widths: list[int]) -> Tensor:
    sides: list[int] = []
    for width, own in reversed(list(zip(widths, values.shape[1:], strict=True))):
        sides += [width - own, 0] if name.startswith("prompt") else [0, width - own]
    return torch.nn.functional.pad(values, sides, value=FILLERS.get(name, 0))


def expected(batches: list[dict[str, Tensor]], kept: Tensor, rank: int) -> dict[str, Tensor]:
    """A rank's rows: its own first ones, then the surplus rows of other ranks, in their order."""
    held = [[(of, row) for row in own.nonzero()[:, 0].tolist()] for of, own in enumerate(kept)]
    quota = sum(map(len, held)) // len(held)
    surplus = [place for places in held for place in places[quota:]]
    given = [places[:quota] for places in held]
    nothing_moves = not surplus
    for places in given:
        missing = quota - len(places)
        places += surplus[:missing]
        del surplus[:missing]
    found = {}
    for name, own in batches[rank].items():
        widest = [max(batch[name].shape[dim] for batch in batches) for dim in range(1, own.dim())]
        widths = list(own.shape[1:]) if nothing_moves else widest
        rows = [widened(batches[of][name], name, widths)[row] for of, row in given[rank] if own.dim()]
        found[name] = torch.stack(rows) if rows else own[:0] if own.dim() else own
    return found


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
        here = expected(batches, kept, ranks.rank)
        assert found.keys() == here.keys()
        for name, value in here.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"seed {seed + number}: {name}")
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
