"""An error on one rank, or the loss of a rank, is reported and does not leave the other ranks waiting for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import slow
from ranks import SIZES, Ranks, World, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.distributed import RowPlan, exchange_rows

ENTROPY, ADVANTAGES = torch.linspace(0.1, 2, 12), torch.linspace(-1, 1, 12)
OFFSETS = torch.tensor([0, 5, 12])
LOGITS = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1))


def calls(ranks: Ranks) -> dict[str, Callable[..., Any]]:
    """Good calls. A test replaces an argument of one rank."""
    group: dict[str, Any] = {"process_group": ranks.group}
    tokens = group | {"advantages": ADVANTAGES, "ratio": 0.5}
    offsets = torch.tensor([0, 5, 12 * ranks.size])
    plan = RowPlan(torch.arange(12), torch.arange(0), [0] * ranks.size, [0] * ranks.size, 12, 0, 12)
    by_ratio = partial(d3s.topk_mask, scores=ENTROPY, ratio=0.5, **group)
    return {
        "topk_mask": by_ratio,
        "topk_mask by k": partial(d3s.topk_mask, ENTROPY, k=3, **group),
        "topk_mask by offsets": partial(by_ratio, offsets=offsets, placement="global"),
        "topk_mask by rows": partial(by_ratio, scores=ENTROPY.view(3, 4), placement="pieces"),
        "select_tokens": partial(d3s.select_tokens, ENTROPY, **tokens),
        "select_tokens_from_logits": partial(
            d3s.select_tokens_from_logits, LOGITS, **tokens | {"advantages": ADVANTAGES[:1]}
        ),
        "exchange_rows": partial(exchange_rows, values=ENTROPY, plan=plan, **group),
    }


def one_differs(ranks: Ranks, name: str, other: dict[str, Any]) -> Any:
    return calls(ranks)[name](**other) if ranks.rank == ranks.size - 1 else calls(ranks)[name]()


DIFFERENT: dict[str, tuple[str, dict[str, Any], str]] = {
    "ratio": ("topk_mask", {"ratio": 0.25}, "ratio: got 0.5 on rank 0 and 0.25 on rank "),
    "ratio as a tensor": ("topk_mask", {"ratio": torch.tensor(0.5)}, "ratio: got 0.5 on rank 0 and 0.5 on rank "),
    "k": ("topk_mask by k", {"k": 4}, "k: got 3 on rank 0 and 4 on rank "),
    "drop_zeros": ("topk_mask", {"drop_zeros": True}, "drop_zeros: got False on rank 0 and True on rank "),
    "offsets": ("topk_mask by offsets", {"offsets": OFFSETS}, "offsets: got [0, 5, "),
    "placement": ("topk_mask by rows", {"placement": "whole"}, "placement: got 'pieces' on rank 0 and 'whole' on rank"),
    "scope": ("select_tokens", {"scope": "sequence"}, "scope: got 'batch' on rank 0 and 'sequence' on rank "),
    "rule": ("select_tokens", {"rule": "entropy"}, "rule: got 'advantage_entropy' on rank 0 and 'entropy' on rank "),
    "out of range": ("topk_mask", {"ratio": 2.0}, "ratio: got 2; takes a number in (0, 1]"),
    "of another type": ("topk_mask", {"ratio": "half"}, "ratio: got str; takes a number or a 0-d tensor"),
    "a mask": ("topk_mask", {"mask": torch.ones(3).bool()}, "mask: got shape [3]; takes one value for each row"),
    "no offsets": ("topk_mask", {"placement": "global"}, "offsets: got None with placement='global'"),
    "no placement": ("topk_mask", {"placement": "some"}, "placement: got 'some'; takes 'whole', 'global' or 'pieces'"),
    "a list": ("topk_mask", {"scores": [1.0, 2.0]}, "scores: got list; takes a tensor"),
    "a function": ("topk_mask", {"ratio": len}, "ratio: got builtin_function_or_method; takes a number"),
    "a number for offsets": ("topk_mask", {"offsets": torch.tensor(3), "placement": "pieces"}, "offsets: got shape []"),
    "a rule of one process": ("select_tokens", {"rule": "entropy_quantile"}, "process_group: got one with rule"),
    "a temperature": ("select_tokens_from_logits", {"temperature": 0.0}, "temperature: got 0; takes a number above 0"),
    "rows": ("exchange_rows", {"values": ENTROPY[:5]}, "values: got shape [5]; takes a row for each of the 12"),
    "columns": ("exchange_rows", {"values": ENTROPY[:, None]}, "values: got {'values': \"torch.float32 ['*']\"} on"),
    "other advantages": ("select_tokens", {"advantages": ADVANTAGES[:3]}, "advantages: got shape [3]; takes one for"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", DIFFERENT)
def test_all_ranks_refuse_alike(size: int, case: str) -> None:
    name, other, said = DIFFERENT[case]
    found = world(size).outcomes(one_differs, name, other, D3S_KERNELS_CHECK="1")
    assert all(isinstance(error, ValueError | TypeError) for error in found), found
    assert len({str(error) for error in found}) == 1
    assert str(found[0]).startswith(said)
    assert f"on rank {size - 1}" in str(found[0])


def wrong_offsets(ranks: Ranks, offsets: Tensor) -> None:
    calls(ranks)["topk_mask by offsets"](offsets=offsets)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 5, 12], "offsets: ends at 12; must end at the length of scores on all ranks, 24"),
        ([1, 5, 24], "offsets: starts at 1; must start at 0"),
        ([0, 25, 24], "offsets: decreases from 25 to 24 at 2; must not decrease"),
    ],
)
def test_wrong_global_offsets_are_refused_by_all_ranks(offsets: list[int], said: str) -> None:
    assert [str(error) for error in world(2).outcomes(wrong_offsets, torch.tensor(offsets))] == [said] * 2


def refused_here(ranks: Ranks) -> str:
    """A bad argument is refused before anything is sent, so the other ranks can go on."""
    if ranks.rank > 0:
        return ""
    try:
        d3s.topk_mask(ENTROPY, 2.0, process_group=ranks.group)
    except ValueError as error:
        return str(error)
    raise AssertionError


def test_an_argument_that_is_wrong_by_itself_is_refused_before_anything_is_sent() -> None:
    assert world(2).run(refused_here)[0].startswith("ratio: got 2")
    assert world(2).run(one_differs, "topk_mask", {})[0].any()  # nothing is left over from the refused call


def until_an_error(ranks: Ranks) -> tuple[str, float]:
    start = time.monotonic()
    try:
        d3s.topk_mask(ENTROPY, 0.5, process_group=ranks.group)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError


def one_dies(ranks: Ranks) -> tuple[str, float]:
    d3s.topk_mask(ENTROPY, 0.5, process_group=ranks.group)
    if ranks.rank == 1:
        os._exit(3)
    return until_an_error(ranks)


def one_stays_away(ranks: Ranks) -> tuple[str, float]:
    if ranks.rank == 1:
        time.sleep(6)
        return "", 0.0
    return until_an_error(ranks)


@pytest.mark.parametrize("task", [one_dies, one_stays_away])
def test_a_rank_that_is_gone_is_torchs_error(task: Callable) -> None:
    """The error comes after the group's timeout at the latest, here 3 seconds."""
    together = World(2, seconds=3)
    for end in together.calls:
        end.send((task, (), {}))
    assert together.calls[0].poll(60)
    good, (error, seconds) = together.calls[0].recv()
    together.end()
    assert good, error
    assert "gloo" in error.lower() or "timed out" in error.lower() or "connection" in error.lower()
    assert seconds < 30


def compiled(ranks: Ranks, backend: str) -> list[bool]:
    across: dict[str, Any] = {"process_group": ranks.group}

    def choose(entropy: Tensor, rewards: Tensor) -> tuple[Tensor, ...]:
        advantages = d3s.group_advantages(2 * rewards, scale="batch", max_rollouts=64, **across)
        kept = d3s.select_rollouts(advantages, 2, max_rollouts=64, **across)
        equal = d3s.select_rollouts(advantages, 2, equal_rows=True, max_rollouts=64, **across)
        return advantages, kept, equal, *d3s.select_tokens(2 * entropy, advantages.view(-1), 0.2, **across)[:4]

    graph = torch.compile(choose, fullgraph=True, backend=backend)
    same = []
    for groups in (4, 5 + ranks.rank, 10):
        entropy, rewards = torch.rand(4 * groups, 30), torch.rand(groups, 4)
        found, expected = graph(entropy, rewards), choose(entropy, rewards)
        same += [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    return same


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        ("aot_eager", "1"),
        slow("aot_eager", "0", shows="that without checks the graph is made as well"),
        slow("inductor", "0", shows="that Inductor's code enters every collective"),
    ],
)
def test_in_a_graph(backend: str, check: str) -> None:
    """While a graph is made, a rank does not communicate with the other ranks, which make their own graphs."""
    for same in world(2).run(compiled, backend, D3S_KERNELS_CHECK=check):
        assert len(same) == 3 * 7
        assert all(same)
