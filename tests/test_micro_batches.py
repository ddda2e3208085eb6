"""Micro-batches of equal work: the largest one is as small as can be, and every row is in one of them."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from helpers import random_generator
from ranks import Ranks, world

import d3s_kernels as d3s


def drawn(rows: int, generator: torch.Generator, most: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of completions and prompts; some completions have no token."""
    completions = (torch.randn(rows, generator=generator) * 0.9 + 2.5).exp().clamp(max=most).long()
    return completions, torch.randint(1, 20, (rows,), generator=generator)


def smallest_largest(rows: list[tuple[int, ...]], number: int, multiple: int) -> int:
    """The positions of the largest part, by trying every division of the rows in this order."""

    def positions(part: list[tuple[int, ...]]) -> int:
        return len(part) * sum(-(-max(lengths) // multiple) * multiple for lengths in zip(*part, strict=True))

    found = []
    for cuts in combinations(range(1, len(rows)), number - 1):
        edges = [0, *cuts, len(rows)]
        found.append(max(positions(rows[a:b]) for a, b in pairwise(edges)))
    return min(found)


@pytest.mark.parametrize("with_prompts", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
def test_the_largest_is_as_small_as_can_be(with_prompts: bool, multiple: int) -> None:
    generator = torch.default_generator
    for _ in range(60):
        rows = int(torch.randint(1, 10, (), generator=generator))
        number = int(torch.randint(1, rows + 1, (), generator=generator))
        completions, prompts = drawn(rows, generator)
        lengths = list(zip(completions.tolist(), *([prompts.tolist()] if with_prompts else []), strict=True))
        orders = [sorted(lengths, key=key, reverse=True) for key in (lambda row: row[0], sum)]
        expected = min(smallest_largest(order, number, multiple) for order in orders)
        options: dict[str, Any] = {"prompt_lengths": prompts} if with_prompts else {}
        parts = d3s.micro_batches(completions, number, multiple_of=multiple, **options)
        assert len(parts) == number
        assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(rows))
        assert max(part.positions for part in parts) == expected
        for part in parts:
            assert len(part.rows) > 0
            assert 0 <= part.width - int(completions[part.rows].max()) < multiple
            assert (0 <= part.prompt_width - int(prompts[part.rows].max()) < multiple) == with_prompts
        budget = max(part.positions for part in parts)
        fewest = d3s.micro_batches(completions, max_positions=max(budget, 1), multiple_of=multiple, **options)
        assert len(fewest) <= number
        assert max(part.positions for part in fewest) <= budget


def test_a_budget_below_the_best_of_fewer_parts_needs_more_of_them() -> None:
    completions, _ = drawn(40, torch.default_generator)
    for number in (2, 5, 9):
        best = max(part.positions for part in d3s.micro_batches(completions, number))
        if best > int(completions.max()):
            assert len(d3s.micro_batches(completions, max_positions=best - 1)) > number


def test_equal_lengths_stay_in_their_order_and_make_equal_parts() -> None:
    parts = d3s.micro_batches(torch.full((12,), 7), 4)
    assert [part.rows.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert d3s.micro_batches(torch.zeros(0, dtype=torch.int32), max_positions=5) == []


def of_ranks(ranks: Ranks, seed: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    completions, prompts = drawn(24, random_generator(seed + ranks.rank))
    parts = d3s.micro_batches(completions, 6, prompt_lengths=prompts, process_group=ranks.group)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(24))
    for part in parts:
        assert (part.width, part.prompt_width) == (int(completions[part.rows].max()), int(prompts[part.rows].max()))
    # No row has more than 110 positions, though the longest prompt and completion of all ranks have 200 together.
    long = torch.tensor([[10, 100], [100, 1], [5, 5]][ranks.rank] * 4).view(4, 2)
    fits = d3s.micro_batches(long[:, 0], max_positions=110, prompt_lengths=long[:, 1], process_group=ranks.group)
    assert max(part.positions for part in fits) <= 110
    uneven = torch.ones(3 + ranks.rank, dtype=torch.long)
    with pytest.raises(ValueError, match=re.escape("lengths: got [3, 4, 5] rows on the ranks; takes the same number")):
        d3s.micro_batches(uneven, 2, process_group=ranks.group)
    return [len(part.rows) for part in parts], [part.positions for part in parts]


def test_ranks_have_as_many_rows_and_nearly_as_much_work() -> None:
    found = world(3).run(of_ranks, int(torch.randint(2**31, ())))
    assert all(rows == found[0][0] for rows, _ in found)
    everyone = torch.tensor([positions for _, positions in found]).double()
    # Work for work: the rank with most of it makes the others wait for a part of what TRL's equal rows would cost.
    waiting = (everyone.amax(dim=0) - everyone).sum() / everyone.amax(dim=0).sum() / 3
    assert waiting < 0.35


BAD: dict[str, tuple[Any, ...]] = {
    "number: got None with max_positions None; takes exactly one of the two": ([3], None, {}),
    "number: got 1 with max_positions 5": ([3], 1, {"max_positions": 5}),
    "number: got 0; takes a whole number of at least 1": ([3], 0, {}),
    "number: got 2 for 1 rows; takes at most one micro-batch for each row": ([3], 2, {}),
    "max_positions: got 4; takes at least 9, which one row needs": ([3, 9], None, {"max_positions": 4}),
    "multiple_of: got 0; takes a whole number of at least 1": ([3], 1, {"multiple_of": 0}),
    "lengths: got -1; takes numbers of at least 0": ([-1], 1, {}),
    "prompt_lengths: got -2; takes numbers of at least 0": ([1], 1, {"prompt_lengths": torch.tensor([-2])}),
    "lengths: got shape [1, 1]; takes [rows]": ([[3]], 1, {}),
    "prompt_lengths: got shape [2]; takes that of lengths, [1]": ([3], 1, {"prompt_lengths": torch.tensor([1, 2])}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_values_are_named(message: str) -> None:
    lengths, number, options = BAD[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        d3s.micro_batches(torch.tensor(lengths), number, **options)


@pytest.mark.parametrize(("lengths", "got"), [([3], "list"), (torch.ones(2), "dtype torch.float32")])
def test_wrong_types_are_named(lengths: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"lengths: got {got}; takes"):
        d3s.micro_batches(lengths, 1)
