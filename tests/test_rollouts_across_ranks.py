"""Rollouts over the ranks of a process group: what is sent, what draws at random, and what is refused.

test_across_ranks.py shows that each rank gets its part of the result of one process.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import assert_same_bits, random_generator
from ranks import SIZES, Ranks, assert_all_refuse, assert_told_apart, on_ranks, world
from torch import Tensor

import d3s_kernels
from d3s_kernels import group_advantages, max_variance_select, select_rollouts
from d3s_kernels.distributed import agreement, rollouts

sizes = pytest.mark.parametrize("size", SIZES)


def random_shares(ranks: Ranks, seed: int) -> Tensor:
    """How often each of this rank's values was drawn, as a share of 600 draws."""
    draws = random_generator(seed + ranks.rank)
    own = torch.zeros(1 + 2 * ranks.rank)
    options = {"rule": "random", "generator": draws, "process_group": ranks.group, "max_rollouts": 3}
    return sum(select_rollouts(own, 2, **options).double() for _ in range(600)) / 600


def test_random_rule_draws_all_alike() -> None:
    shares = torch.cat(world(2).run(random_shares, int(torch.randint(2**31, ()))))
    assert shares.sum() == pytest.approx(2)
    assert (shares - 0.5).abs().max() < 0.13  # six standard deviations


@on_ranks(*SIZES)
def rewards_that_are_equal_up_to_rounding(ranks: Ranks) -> None:
    """One group of all ranks, in the dtype of the rewards: their advantages are exactly 0."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rewards = torch.tensor([1, 1 - torch.finfo(dtype).eps / 2] * ranks.size, dtype=dtype)
        own, whole = rewards[2 * ranks.rank :][:2], torch.tensor([0, len(rewards)])
        found = group_advantages(own, offsets=whole, placement="global", process_group=ranks.group)
        assert not found.any(), dtype


@on_ranks(2)
def groups_of_one_rank_are_local(ranks: Ranks) -> None:
    """A mesh is accepted as a group."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks.size, 1), mesh_dim_names=("all", "one"))
    values, offsets = torch.randn(20, requires_grad=True), torch.tensor([0, 7, 20])
    for local in ({}, {"offsets": offsets}, {"offsets": offsets, "placement": "global"}):
        across = local | {"process_group": mesh["one"]}
        local = {"offsets": local.get("offsets")}
        for function, *keep in ((group_advantages,), (max_variance_select, 3), (select_rollouts, 3)):
            found = function(values, *keep, **across)
            assert not found.requires_grad
            assert_same_bits(found, function(values, *keep, **local))
        kept = select_rollouts(values, 3, equal_rows=True, **across)
        assert_same_bits(kept, select_rollouts(values, 3, **local))


# ---- what is refused ------------------------------------------------------------------------------------------------

FLAT, ROWS = torch.zeros(6), torch.zeros(2, 3)
GLOBAL = {"placement": "global", "offsets": torch.tensor([0, 5, 12])}  # for two ranks with 6 values each
GOOD = {
    "max_variance_select": {"values": FLAT, "keep": 1},
    "group_advantages": {"rewards": FLAT},
    "select_rollouts": {"advantages": FLAT, "keep": 1},
}
# What is bad, and what is said. test_errors.py has all that is refused in one process; of that, one case is here.
REFUSED = {
    "max_variance_select": [
        ({"keep": torch.tensor(0)}, "keep: got 0; takes at least 1"),
        ({"placement": "pieces"}, "placement: got 'pieces'; takes 'whole'"),
        ({"values": ROWS, "placement": "global"}, "offsets: got None with placement="),
        ({"max_rollouts": 5}, "max_rollouts: got 5 with 6 values"),
        ({"max_rollouts": 0}, "max_rollouts: got 0; takes at least 1"),
        ({"max_rollouts": 6.5}, "max_rollouts: got 6.5; takes a whole"),
        ({"offsets": torch.tensor([0, 5])}, "offsets: ends at 5; must"),
        ({"values": ROWS, **GLOBAL}, "values: got shape [2, 3] with offsets"),
        ({**GLOBAL, "offsets": torch.ones(2)}, "offsets: got shape [2] of"),
        ({**GLOBAL, "offsets": torch.arange(1, 5)}, "offsets: starts at"),
        ({**GLOBAL, "offsets": torch.tensor([0, 9, 3])}, "offsets: decr"),
        ({**GLOBAL, "offsets": torch.arange(0)}, "offsets: got shape"),
    ],
    "group_advantages": [
        ({"scale": "sum"}, "scale: got 'sum'"),
        ({**GLOBAL, "offsets": torch.tensor([[0, 12]])}, "offsets: got shape"),
    ],
    "select_rollouts": [
        ({"rule": "best"}, "rule: got 'best'"),
        ({"advantages": ROWS, "equal_rows": True, "rule": "random"}, "equal_rows: got True"),
        ({"advantages": ROWS, "process_group": "all"}, "process_group: got str; takes a"),
    ],
}
DIFFERENT = {  # what the second rank has, message
    "max_variance_select": [
        ({"keep": 2}, "keep: got 1 on rank 0 and 2 on rank 1"),
        ({"keep": torch.tensor(2)}, "keep: got 1 on rank 0 and 2 on rank 1"),
        ({"values": FLAT.half()}, "values: got \"torch.float32 ['*']\" on rank 0 and"),
        ({"values": ROWS}, "values: got \"torch.float32 ['*']\" on rank 0 and"),
        ({"max_rollouts": 8}, "max_rollouts: got None on rank 0 and 8 on rank 1"),
        ({"offsets": torch.tensor([0, 6])}, "offsets: got False on rank 0 and True on rank 1"),
        (GLOBAL, "offsets: got False on rank 0 and [0, 5, 12]"),
    ],
    "group_advantages": [
        ({"scale": "batch"}, "scale: got 'group' on rank 0 and 'batch' on rank 1"),
        ({"eps": 0.5}, "eps: got 0.0001 on rank 0 and 0.5 on rank 1"),
        ({"ddof": 0}, "ddof: got 1 on rank 0 and 0 on rank 1"),
    ],
    "select_rollouts": [
        ({"rule": "highest"}, "rule: got 'max_variance' on rank 0 and 'highest' on rank 1"),
        ({"scope": "group"}, "scope: got 'batch' on rank 0 and 'group' on rank 1"),
        ({"equal_rows": True}, "equal_rows: got False on rank 0 and True on rank 1"),
    ],
}


def cases_of(cases: dict[str, list[tuple[dict[str, Any], str]]]) -> list[tuple[str, dict[str, Any], str]]:
    return [(function, *case) for function, some in cases.items() for case in some]


def call(ranks: Ranks, function: str, arguments: list[dict[str, Any]]) -> Tensor:
    return getattr(d3s_kernels, function)(**{"process_group": ranks.group} | arguments[ranks.rank])


@pytest.mark.parametrize(("function", "bad", "said"), cases_of(REFUSED))
def test_bad_arguments(function: str, bad: dict[str, Any], said: str) -> None:
    good = None if "process_group" in bad else GOOD[function]
    assert_all_refuse(call, function, bad=GOOD[function] | bad, said=said, good=good)


@pytest.mark.parametrize(("function", "other", "said"), cases_of(DIFFERENT))
def test_what_differs_between_ranks(function: str, other: dict[str, Any], said: str) -> None:
    assert_told_apart(call, function, good=GOOD[function], other=GOOD[function] | other, said=said)


def of_other_dtypes(ranks: Ranks, bound: dict[str, int], known: bool) -> Tensor:
    """The first rank was given whole numbers, the other one not."""
    rewards = torch.tensor([0, 1, 1] if ranks.rank == 0 else [0.0, 0.5])
    with mock.patch.object(rollouts, "_is_at_hand", return_value=known):
        return group_advantages(rewards, process_group=ranks.group, **bound)


@pytest.mark.parametrize("bound", [{}, {"max_rollouts": 3}])
def test_rewards_of_different_dtypes(bound: dict[str, int]) -> None:
    """All ranks say so, or have NaN where the host does not know; none waits."""
    said = "rewards: got torch.float64 on rank 0 and torch.float32 on rank 1; takes the same on all ranks of the"
    for found in world(2).outcomes(of_other_dtypes, bound, True):
        assert isinstance(found, ValueError)
        assert str(found).startswith(said)
    if bound:
        assert torch.cat(world(2).run(of_other_dtypes, bound, False)).isnan().all()


@pytest.mark.parametrize("bound", [{}, {"max_rollouts": 9}])
@pytest.mark.parametrize("function", GOOD)
def test_offsets_of_all_ranks_end_where_their_values_end(function: str, bound: dict[str, int]) -> None:
    given = GOOD[function] | bound | {"placement": "global", "offsets": torch.tensor([0, 5, 11])}
    for environment in ({}, {"D3S_KERNELS_CHECK": "1"}):
        found = world(2).outcomes(call, function, [given, given], **environment)
        assert [type(error) for error in found] == [ValueError, ValueError]
        said = "offsets: ends at 11; must end at the length of "
        assert str(found[0]) == str(found[1])
        assert str(found[0]).startswith(said)
        assert str(found[0]).endswith("s on all ranks, 12")


def with_unchecked_offsets(ranks: Ranks, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """As on a GPU, where offsets are not checked."""
    across = {"offsets": offsets, "placement": "global", "process_group": ranks.group}
    known, agreement.is_known = agreement.is_known, lambda _: False
    try:
        values = torch.arange(6.0) + 6 * ranks.rank
        return group_advantages(values, **across), max_variance_select(values, 4, **across)
    finally:
        agreement.is_known = known


def test_what_unchecked_offsets_leave_out() -> None:
    (first, kept), (second, kept_too) = world(2).run(with_unchecked_offsets, torch.tensor([0, 4, 7]))
    assert torch.cat([first, second]).isnan().tolist() == [False] * 7 + [True] * 5
    assert torch.cat([kept, kept_too]).tolist() == [True] * 7 + [False] * 5


def at_random(ranks: Ranks, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """All ranks use the same seed, as trainers often do."""
    torch.manual_seed(seed)
    across = {"rule": "random", "process_group": ranks.group}
    values = torch.rand(6, 4)
    rollouts = [d3s_kernels.select_rollouts(values, 2, max_rollouts=24, **across) for _ in range(40)]
    tokens = [d3s_kernels.select_tokens(values, None, 0.5, **across).mask for _ in range(40)]
    return rollouts, tokens


@sizes
def test_ranks_that_are_seeded_alike_draw_by_themselves(size: int) -> None:
    of_ranks = world(size).run(at_random, int(torch.randint(2**31, ())))
    for drawn in zip(*of_ranks, strict=True):  # rollouts, then tokens
        first, second = (torch.stack(masks).flatten(1) for masks in drawn[:2])
        assert not (first == second).all(1).any()
        agreeing = (first == second).float().mean()  # half of independent masks agree, with a deviation of 0.016
        assert 0.4 < agreeing < 0.6
        assert sum(torch.stack(masks).flatten(1).sum(1) for masks in drawn).eq(12 * size).all()
