"""What each op sends across ranks: the counted bytes equal the formulas of docs/scaling.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import SIZES, Ranks, world
from traffic import asked, counted

import d3s_kernels as d3s
from d3s_kernels._across_ranks import tokens as across_ranks
from d3s_kernels._across_ranks.tokens import FEW_RANKS, FEW_SEGMENTS
from d3s_kernels.distributed import (
    exchange_rows,
    plan_rows,
    vocab_parallel_linear_logprob_entropy,
    vocab_parallel_logprob_entropy,
)

formulas = pytest.importorskip("benchmarks.traffic")
sizes = pytest.mark.parametrize("size", SIZES)
ROOT = Path(__file__).parents[1]
Sent = list[tuple[str, int]]


def sent_by_tokens(ranks: Ranks, tokens: int, few_ranks: int) -> list[tuple[str, Sent, Sent]]:
    """Ranks have different numbers of tokens, and the first has none."""
    across_ranks.FEW_RANKS = few_ranks
    own, across = tokens * ranks.rank, {"process_group": ranks.group}
    entropy, advantages = torch.rand(own), torch.randn(own)
    found: list[tuple[str, Sent, Sent]] = []

    def count(name: str, expected: Sent, call: Any) -> None:
        with counted() as calls:
            call()
        found.append((name, list(calls), expected))

    count("topk_mask", formulas.topk_mask(ranks.size), lambda: d3s.topk_mask(entropy, 0.3, **across))
    count("by k", formulas.topk_mask(ranks.size), lambda: d3s.topk_mask(entropy, k=3, **across))
    count(
        "select_tokens",
        formulas.select_tokens(ranks.size),
        lambda: d3s.select_tokens(entropy, advantages, 0.3, **across),
    )
    count(
        "without zeros", formulas.select_tokens(ranks.size, drop_zeros=True),
        lambda: d3s.select_tokens(entropy, advantages, 0.3, drop_zeros=True, **across),
    )  # fmt: skip
    total = tokens * sum(range(ranks.size))
    for segments in (1, FEW_SEGMENTS, FEW_SEGMENTS + 1, 100):
        edges = torch.linspace(0, total, segments + 1).long()
        cut = across | {"offsets": edges, "placement": "global"}
        expected = formulas.topk_mask(ranks.size, segments, global_offsets=True)
        count(f"{segments} segments", expected, lambda cut=cut: d3s.topk_mask(entropy, 0.3, **cut))
        expected = formulas.select_tokens(ranks.size, segments, by_offsets=True)
        each = torch.randn(segments)
        count(
            f"{segments} sequences", expected,
            lambda cut=cut, each=each: d3s.select_tokens(entropy, each, 0.3, scope="sequence", **cut),
        )  # fmt: skip
    rows = entropy.view(ranks.rank, tokens)
    count("whole rows", [], lambda: d3s.topk_mask(rows, 0.3, **across))
    count(
        "whole sequences", [],
        lambda: d3s.select_tokens(rows, advantages.view(ranks.rank, tokens), 0.3, scope="sequence", **across),
    )  # fmt: skip
    across_ranks.FEW_RANKS = FEW_RANKS
    return found


def sent_by_rollouts(ranks: Ranks, groups: int) -> list[tuple[str, Sent, Sent]]:
    across = {"process_group": ranks.group}
    rewards = torch.rand(groups * (1 + ranks.rank), 4)
    largest = 4 * groups * ranks.size
    found: list[tuple[str, Sent, Sent]] = []
    for bound in (None, largest, largest + 5):
        for name, call in {
            "group_advantages": lambda most: d3s.group_advantages(rewards, scale="batch", max_rollouts=most, **across),
            "select_rollouts": lambda most: d3s.select_rollouts(rewards, 2, max_rollouts=most, **across),
            "equal rows": lambda most: d3s.select_rollouts(rewards, 2, equal_rows=True, max_rollouts=most, **across),
            "max_variance_select": lambda most: d3s.max_variance_select(
                rewards.view(-1), 2, max_rollouts=most, **across
            ),
        }.items():
            with counted() as calls:
                call(bound)
            width = 8 if name == "group_advantages" else 4
            expected = formulas.rollouts(bound or largest, bounded=bound is not None, width=width)
            found.append((name, list(calls), expected))
    with counted() as calls:
        d3s.select_rollouts(rewards, 2, scope="group", **across)
        d3s.group_advantages(rewards, **across)
    found.append(("whole groups", list(calls), []))
    kept = torch.zeros(len(rewards), dtype=torch.bool)
    kept[: ranks.size if ranks.rank == 0 else 0] = True  # all on the first rank, which gives one to each of the others
    with counted() as calls:
        plan = plan_rows(kept, ranks.group)
    found.append(("plan_rows", list(calls), formulas.plan_rows()))
    with counted() as calls:
        exchange_rows(rewards, plan, ranks.group)
    moved = ranks.size - 1 if ranks.rank == 0 else 0
    found.append(("exchange_rows", list(calls), formulas.exchange_rows(moved, 16)))
    return found


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
