"""topk_mask and select_tokens across ranks: bit-identical to one process that has everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers import DTYPES, rounds
from ranks import SIZES, Ranks, pieces_of, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.distributed import tokens as across_ranks

SEEDS = rounds(60)  # for each number of ranks and each task


class Drawn(NamedTuple):
    """A problem as one process sees it, and the lengths of the ranks' parts. It is the same on all ranks."""

    generator: torch.Generator
    scores: Tensor
    advantages: Tensor
    mask: Tensor | None
    lengths: list[int]
    options: dict[str, Any]

    def own(self, values: Tensor | None, rank: int) -> Tensor | None:
        return None if values is None else values.split(self.lengths)[rank]

    def below(self, bound: int) -> int:
        return int(torch.randint(bound, (), generator=self.generator))

    def offsets(self, total: int) -> Tensor:
        """Offsets of up to 40 segments: some draws exceed the number of segments up to which digits are longer."""
        count = self.below(41)
        edges = torch.randint(total + 1, (max(0, count - 1),), generator=self.generator).sort().values
        dtype = (torch.int64, torch.int32)[self.below(2)]
        return torch.cat([torch.tensor([0]), edges, torch.tensor([total])]).to(dtype) if count else torch.tensor([0])


def draw(seed: int, size: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def chance(share: float) -> bool:
        return float(torch.rand((), generator=generator)) < share

    total = int(torch.randint(400, (), generator=generator))
    lengths = pieces_of(total, size, generator)
    scores = torch.randn(total, generator=generator)
    if chance(0.5):  # ties, within a rank and across them
        scores = scores.round()
    if chance(0.3):
        scores[torch.rand(total, generator=generator) < 0.3] = torch.nan
    if chance(0.2):
        scores[torch.rand(total, generator=generator) < 0.1] = torch.inf * (1 if chance(0.5) else -1)
    mask = torch.rand(total, generator=generator) < 0.7 if chance(0.5) else None
    if mask is not None and chance(0.1):
        mask[:] = False
    dtype = DTYPES[int(torch.randint(3, (), generator=generator))]
    ratio = float(torch.rand((), generator=generator)) or 1.0
    options: dict[str, Any] = {"drop_zeros": chance(0.3), "ratio": ratio}
    if chance(0.3):
        options["ratio"] = torch.tensor(ratio, dtype=torch.float64 if chance(0.5) else torch.float32)
    advantages = torch.randn(total, generator=generator)
    return Drawn(generator, scores.to(dtype), advantages, mask, lengths, options)


def seeds(first: int, size: int) -> Iterator[tuple[int, Drawn]]:
    """Half of the problems take the path for many ranks, which sum their counts with an all-reduce."""
    for seed in range(first, first + SEEDS):
        with mock.patch.object(across_ranks, "FEW_RANKS", across_ranks.FEW_RANKS if seed % 4 < 2 else 1):
            yield seed, draw(seed, size)


def check(seed: int, found: Any, whole: Any, drawn: Drawn, rank: int, dim: int = 0) -> None:
    """Compares a rank's mask or selection with its part of what one process gives."""
    found, whole = (
        (each,) if isinstance(each, Tensor) else (each.mask, each.count, each.threshold) for each in (found, whole)
    )
    part = whole[0].split(drawn.lengths, dim)[rank].reshape(found[0].shape)
    for one, other in zip(found, (part, *whole[1:]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda said: f"seed {seed}: {said}")


# ---- one segment -----------------------------------------------------------------------------------------------------


def one_k_over_all_ranks(ranks: Ranks, first: int) -> None:
    for seed, drawn in seeds(first, ranks.size):
        options = dict(drawn.options)
        if seed % 3 == 0:
            k = 1 + drawn.below(2 * len(drawn.scores) + 1)
            options = {"k": torch.tensor(k) if seed % 2 else k, "drop_zeros": options["drop_zeros"]}
        whole = d3s.topk_mask(drawn.scores, mask=drawn.mask, **options)
        own = d3s.topk_mask(
            drawn.own(drawn.scores, ranks.rank), mask=drawn.own(drawn.mask, ranks.rank), process_group=ranks.group,
            **options,
        )  # fmt: skip
        check(seed, own, whole, drawn, ranks.rank)


def all_tokens_as_one_pool(ranks: Ranks, first: int) -> None:
    """By rows, by offsets of the rank, or flat. Advantages are for all, for tokens or for sequences."""
    for seed, drawn in seeds(first, ranks.size):
        kind = ("flat", "rows", "offsets")[seed % 3]
        entropy, advantages, mask, lengths = drawn.scores.abs(), drawn.advantages, drawn.mask, drawn.lengths
        own: dict[str, Any] = {}
        if kind == "rows":
            rows = [length // 7 for length in lengths]
            keep = torch.cat([torch.arange(n) < r * 7 for n, r in zip(lengths, rows, strict=True)])
            entropy, advantages = entropy[keep].view(-1, 7), advantages[keep].view(-1, 7)
            mask, lengths = None if mask is None else mask[keep].view(-1, 7), rows
            if seed % 2:
                advantages = advantages[:, 0]
        drawn = drawn._replace(lengths=lengths)
        ours = drawn.own(entropy, ranks.rank), drawn.own(advantages, ranks.rank), drawn.own(mask, ranks.rank)
        if kind == "offsets" and seed % 2:
            of_ranks = [drawn.offsets(n) if n else torch.tensor([0]) for n in lengths]
            # a rank without a sequence can have no tokens either
            of_ranks = [o if len(o) > 1 else torch.tensor([0, n]) for o, n in zip(of_ranks, lengths, strict=True)]
            each = [torch.randn(len(o) - 1, generator=drawn.generator) for o in of_ranks]
            advantages = torch.cat([a.repeat_interleave(o.diff()) for a, o in zip(each, of_ranks, strict=True)])
            if any(len(a) == n for a, n in zip(each, lengths, strict=True)):
                continue  # one process too would take them for advantages of tokens
            own = {"offsets": of_ranks[ranks.rank]}
            ours = ours[0], each[ranks.rank], ours[2]
        elif seed % 5 == 0:
            advantages = torch.tensor(-1.5)
            ours = ours[0], advantages, ours[2]
        whole = d3s.select_tokens(entropy, advantages, mask=mask, **drawn.options)
        found = d3s.select_tokens(*ours[:2], mask=ours[2], process_group=ranks.group, **own, **drawn.options)
        check(seed, found, whole, drawn, ranks.rank)


# ---- segments that are cut -------------------------------------------------------------------------------------------


def cut_by_global_offsets(ranks: Ranks, first: int) -> None:
    for seed, drawn in seeds(first, ranks.size):
        total, rank = len(drawn.scores), ranks.rank
        offsets = drawn.offsets(total)
        if len(offsets) == 1:
            offsets = torch.tensor([0, total])
        own, mask = drawn.own(drawn.scores, rank), drawn.own(drawn.mask, rank)
        whole = d3s.topk_mask(drawn.scores, mask=drawn.mask, offsets=offsets, **drawn.options)
        found = d3s.topk_mask(
            own, mask=mask, offsets=offsets, process_group=ranks.group, placement="global", **drawn.options
        )
        check(seed, found, whole, drawn, rank)
        entropy, for_tokens = drawn.scores.abs(), seed % 2 == 0
        each = drawn.advantages if for_tokens else torch.randn(len(offsets) - 1, generator=drawn.generator)
        if len(each) == total == len(offsets) - 1:
            continue
        scope = ("sequence", "batch")[seed % 3 == 0]
        all_of_it = d3s.select_tokens(entropy, each, mask=drawn.mask, offsets=offsets, scope=scope, **drawn.options)
        selected = d3s.select_tokens(
            drawn.own(entropy, rank), drawn.own(each, rank) if for_tokens else each, mask=mask, offsets=offsets,
            scope=scope, process_group=ranks.group, placement="global", **drawn.options,
        )  # fmt: skip
        check(seed, selected, all_of_it, drawn, rank)


def pieces_of_every_segment(ranks: Ranks, first: int) -> None:
    """Every rank has some columns of each row; once as rows, once as offsets of the rank."""
    for seed, drawn in seeds(first, ranks.size):
        rank, rows = ranks.rank, 1 + drawn.below(24)
        columns = len(drawn.scores) // rows
        if columns == 0:
            continue
        scores = drawn.scores[: rows * columns].view(rows, columns)
        mask = None if drawn.mask is None else drawn.mask[: rows * columns].view(rows, columns)
        widths = pieces_of(columns, ranks.size, drawn.generator)
        drawn = drawn._replace(lengths=widths)
        whole = d3s.topk_mask(scores, mask=mask, **drawn.options)
        own = scores.split(widths, 1)[rank].contiguous()
        own_mask = None if mask is None else mask.split(widths, 1)[rank].contiguous()
        across: dict[str, Any] = {"process_group": ranks.group, "placement": "pieces", **drawn.options}
        found = d3s.topk_mask(own, mask=own_mask, **across)
        check(seed, found, whole, drawn, rank, dim=1)
        flat_mask = None if own_mask is None else own_mask.flatten()
        offsets = torch.arange(rows + 1) * widths[rank]
        flat = d3s.topk_mask(own.flatten(), mask=flat_mask, offsets=offsets, **across)
        check(seed, flat, whole, drawn, rank, dim=1)
        each = torch.randn(rows, generator=drawn.generator)
        expected = d3s.select_tokens(scores.abs(), each, mask=mask, scope="sequence", **drawn.options)
        selected = d3s.select_tokens(own.abs(), each, mask=own_mask, scope="sequence", **across)
        check(seed, selected, expected, drawn, rank, dim=1)
        if all(width == 1 for width in widths):
            continue  # as many tokens as sequences: advantages would count as those of tokens
        entropy = own.abs().flatten()
        selected = d3s.select_tokens(entropy, each, mask=flat_mask, offsets=offsets, scope="sequence", **across)
        check(seed, selected, expected, drawn, rank, dim=1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "task", [one_k_over_all_ranks, all_tokens_as_one_pool, cut_by_global_offsets, pieces_of_every_segment]
)
def test_each_rank_has_its_part_of_the_whole(task: Callable[[Ranks, int], None], size: int) -> None:
    world(size).run(task, int(torch.randint(2**40, ())))
