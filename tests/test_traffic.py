"""What each op sends across ranks: the counted bytes equal the formulas of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import SIZES, Ranks, world
from traffic import asked, counted

import d3s_kernels as d3s
from d3s_kernels.distributed import (
    exchange_rows,
    plan_rows,
    vocab_parallel_linear_logprob_entropy,
    vocab_parallel_logprob_entropy,
)
from d3s_kernels.distributed import tokens as across_ranks
from d3s_kernels.distributed.tokens import FEW_RANKS, FEW_SEGMENTS

formulas = pytest.importorskip("benchmarks.traffic")
sizes = pytest.mark.parametrize("size", SIZES)
ROOT = Path(__file__).parents[1]
Sent = list[tuple[str, int]]


def counts_of(name: str, expected: Sent, call: Callable[[], object]) -> tuple[str, Sent, Sent]:
    with counted() as calls:
        call()
    return name, list(calls), expected


def sent_by_tokens(ranks: Ranks, tokens: int, few_ranks: int) -> list[tuple[str, Sent, Sent]]:
    """Ranks have different numbers of tokens, and the first has none."""
    across_ranks.FEW_RANKS = few_ranks
    own, across = tokens * ranks.rank, {"process_group": ranks.group}
    entropy, advantages = torch.rand(own), torch.randn(own)
    found: list[tuple[str, Sent, Sent]] = []

    def count(name: str, expected: Sent, call: Any) -> None:
        found.append(counts_of(name, expected, call))

    top_k, select = formulas.topk_mask, formulas.select_tokens
    count("topk_mask", top_k(ranks.size), lambda: d3s.topk_mask(entropy, 0.3, **across))
    count("by k", top_k(ranks.size), lambda: d3s.topk_mask(entropy, k=3, **across))
    for drop in (False, True):
        given = across | {"drop_zeros": drop}
        expected = select(ranks.size, drop_zeros=drop)
        count(f"tokens, {drop}", expected, lambda given=given: d3s.select_tokens(entropy, advantages, 0.3, **given))
    total = tokens * sum(range(ranks.size))
    for segments in (1, FEW_SEGMENTS, FEW_SEGMENTS + 1, 100):
        cut = across | {"offsets": torch.linspace(0, total, segments + 1).long(), "placement": "global"}
        expected = top_k(ranks.size, segments, global_offsets=True)
        count(f"{segments} segments", expected, lambda cut=cut: d3s.topk_mask(entropy, 0.3, **cut))
        expected, each = select(ranks.size, segments, by_offsets=True), (entropy, torch.randn(segments), 0.3)
        cut = cut | {"scope": "sequence"}
        count(f"{segments} sequences", expected, lambda each=each, cut=cut: d3s.select_tokens(*each, **cut))
    rows, of_rows = entropy.view(ranks.rank, tokens), advantages.view(ranks.rank, tokens)
    count("whole rows", [], lambda: d3s.topk_mask(rows, 0.3, **across))
    count("whole sequences", [], lambda: d3s.select_tokens(rows, of_rows, 0.3, scope="sequence", **across))
    across_ranks.FEW_RANKS = FEW_RANKS
    return found


def sent_by_rollouts(ranks: Ranks, groups: int) -> list[tuple[str, Sent, Sent]]:
    across = {"process_group": ranks.group}
    rewards = torch.rand(groups * (1 + ranks.rank), 4)
    largest = 4 * groups * ranks.size
    found: list[tuple[str, Sent, Sent]] = []
    for bound in (None, largest, largest + 5):
        most = across | {"max_rollouts": bound}
        for name, call in {
            "group_advantages": partial(d3s.group_advantages, rewards, scale="batch", **most),
            "select_rollouts": partial(d3s.select_rollouts, rewards, 2, **most),
            "equal rows": partial(d3s.select_rollouts, rewards, 2, equal_rows=True, **most),
            "max_variance_select": partial(d3s.max_variance_select, rewards.view(-1), 2, **most),
        }.items():
            width = 8 if name == "group_advantages" else 4
            expected = formulas.rollouts(bound or largest, bounded=bound is not None, width=width)
            found.append(counts_of(name, expected, call))
    found.append(counts_of("whole groups", [], partial(d3s.select_rollouts, rewards, 2, scope="group", **across)))
    found.append(counts_of("advantages", [], partial(d3s.group_advantages, rewards, **across)))
    own = torch.arange(len(rewards) + 1) * 4
    of_offsets = partial(d3s.max_variance_select, rewards.view(-1), 2, offsets=own, **across)
    found.append(counts_of("groups by the rank's offsets", [], of_offsets))
    bounded = across | {"max_rollouts": largest}
    found.append(counts_of("scaled by nothing", [], partial(d3s.group_advantages, rewards, scale="none", **bounded)))
    total = 4 * groups * ranks.size * (ranks.size + 1) // 2
    cut_anywhere = bounded | {"offsets": torch.tensor([0, 3, total]), "placement": "global"}
    for name, call, width in (("values", d3s.max_variance_select, 4), ("advantages", d3s.group_advantages, 8)):
        given = (rewards.view(-1), 2) if width == 4 else (rewards.view(-1),)
        expected = formulas.rollouts(largest, bounded=True, width=width)
        found.append(counts_of(f"{name} of groups on several ranks", expected, partial(call, *given, **cut_anywhere)))
    kept = torch.zeros(len(rewards), dtype=torch.bool)
    kept[: ranks.size if ranks.rank == 0 else 0] = True  # all on the first rank, which gives one to each of the others
    found.append(counts_of("plan_rows", formulas.plan_rows(), partial(plan_rows, kept, ranks.group)))
    plan, moved = plan_rows(kept, ranks.group), ranks.size - 1 if ranks.rank == 0 else 0
    exchange = partial(exchange_rows, rewards, plan, ranks.group)
    return [*found, counts_of("exchange_rows", formulas.exchange_rows(moved, 16), exchange)]


def sent_by_logits(ranks: Ranks, rows: int, hidden: int) -> list[tuple[str, Sent, Sent]]:
    found: list[tuple[str, Sent, Sent]] = []
    torch.manual_seed(rows)  # hidden states and labels are the same on all ranks
    states, labels = torch.randn(rows, hidden, requires_grad=True), torch.randint(10 * ranks.size, (rows,))
    kept, first = torch.rand(rows) < 0.3, 10 * ranks.rank
    logits, weight = torch.randn(rows, 10, requires_grad=True), torch.randn(10, hidden, requires_grad=True)

    def count(name: str, expected: Sent, call: Any) -> Any:
        names = {"all_reduce": formulas.REDUCE, "all_gather": formulas.GATHER}
        with asked() as told:
            result = call()
        found.append((name, [(names[op], shape.numel() * dtype.itemsize) for op, shape, dtype in told], expected))
        return result

    forward = formulas.vocab_parallel(rows)
    logprob, _ = count("logits", forward, lambda: vocab_parallel_logprob_entropy(logits, labels, first, ranks.group))
    count("logits, backward", [], lambda: logprob.sum().backward())
    logprob, entropy = count(
        "head", forward, lambda: vocab_parallel_linear_logprob_entropy(states, weight, labels, first, ranks.group)
    )
    backward = formulas.vocab_parallel_head_backward(rows, int(kept.sum()), hidden)
    count("head, backward", backward, lambda: (logprob + entropy)[kept].sum().backward())
    return found


@sizes
@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        (sent_by_tokens, (10, FEW_RANKS)),
        (sent_by_tokens, (1000, 3)),
        (sent_by_rollouts, (5,)),
        (sent_by_logits, (50, 8)),
        (sent_by_logits, (7, 64)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_as_many_bytes_as_the_formulas_say(size: int, task: Any, arguments: tuple[int, ...]) -> None:
    for rank, found in enumerate(world(size).run(task, *arguments)):
        for name, counts, expected in found:
            assert counts == expected, f"{name}, on rank {rank} of {size}"


def test_the_page_has_the_tables_of_the_formulas() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    for gpus in (64, 1024):
        assert formulas.table(formulas.Step(gpus)) in page
