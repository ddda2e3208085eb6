"""variance_mass: the fewest groups that have a share of the variance, against the reference's loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import INF, NAN, Segmented, assert_identical, repetitive, segmented
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks, world
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import d3s_kernels as d3s
from d3s_kernels import groups_without_spread, reference, variance_mass

SHARES = (0.25, 0.5, 0.9, 1.0)
rewards = repetitive | st.sampled_from([NAN, INF, -INF]) | st.floats(-1000, 1000, width=32)


@given(segmented(rewards), st.sampled_from(SHARES))
def test_any_groups(case: Segmented, share: float) -> None:
    """In rows and packed, with ties, NaN, infinite rewards, and empty groups."""
    found = variance_mass(case.values, share, offsets=case.offsets)
    assert_identical(found, reference.variance_mass(case.values, share, offsets=case.offsets))
    if share == 1:
        assert found.equal(~groups_without_spread(case.values, offsets=case.offsets))


def test_the_fewest_groups_are_marked() -> None:
    """Of 0 and 1, with variances of 3/16, 4/16, 0, 3/16 and 4/16."""
    batch = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 1, 0]])
    for share, kept in ((1e-9, [1]), (0.28, [1]), (0.3, [1, 4]), (8 / 14, [1, 4]), (0.6, [0, 1, 4]), (1, [0, 1, 3, 4])):
        assert variance_mass(batch, share).nonzero().flatten().tolist() == kept
    assert variance_mass(batch.view(5, 1, 4), 0.3).tolist() == [[False], [True], [False], [False], [True]]
    assert variance_mass(batch[0], 0.3)


def test_rounding_decides_nothing() -> None:
    """The same three rewards are added in two orders, so that variances differ by rounding: they tie, and half of the
    groups have half of the variance.
    """
    a, b, c = torch.tensor([0.1, 0.2, 0.35])
    zero = torch.zeros(())
    batch = torch.stack([torch.stack([total, zero]) for total in (c + b + a, a + b + c)] * 2)
    assert batch.double().var(dim=1, correction=0).unique().numel() == 2
    for share, kept in ((0.25, [0]), (0.5, [0, 1]), (0.75, [0, 1, 2])):
        assert variance_mass(batch, share).nonzero().flatten().tolist() == kept


def test_nothing_is_marked_without_spread() -> None:
    for batch in (torch.ones(3, 4), torch.full((3, 4), NAN), torch.tensor([[INF, 1.0], [2.0, 2.0]])):
        for share in SHARES:
            assert not variance_mass(batch, share).any()
    for shape in ((0, 8), (3, 0), (0,)):
        assert variance_mass(torch.empty(shape), 0.5).shape == shape[:-1]
    assert variance_mass(torch.empty(0), 0.5, offsets=torch.tensor([0])).shape == (0,)


def test_no_group_is_too_small_for_the_whole_share() -> None:
    batch = torch.tensor([[0.0, 1e9], [0.0, 1e-4]], dtype=torch.float64)
    assert variance_mass(batch, 1.0).all()
    assert variance_mass(batch, 0.99).tolist() == [True, False]


def test_nothing_waits_for_the_device() -> None:
    with FakeTensorMode() as mode:
        assert variance_mass(mode.from_tensor(torch.randn(5, 4)), 0.5).shape == (5,)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan])
def test_a_bad_share_is_named(share: float) -> None:
    with pytest.raises(ValueError, match=rf"share: got {share}; takes a number in \(0, 1\]"):
        variance_mass(torch.randn(2, 4), share)
    with pytest.raises(TypeError, match=r"share: got '0\.5'; takes a number"):
        variance_mass(torch.randn(2, 4), "0.5")  # type: ignore[arg-type]


# ---- across ranks ----------------------------------------------------------------------------------------------------


def of_ranks(ranks: Ranks, batch: Tensor, groups: list[int], rollouts: list[int]) -> list[Tensor]:
    """For each share: rows, packed groups that are whole on a rank, and groups that are cut anywhere."""
    across: dict[str, Any] = {"process_group": ranks.group}
    edges, n = torch.arange(len(batch) + 1) * batch.shape[1], batch.shape[1]
    rows, own = batch.split(groups)[ranks.rank], edges[: groups[ranks.rank] + 1]
    piece = batch.flatten().split(rollouts)[ranks.rank]
    found = []
    for share in SHARES:
        alike = [variance_mass(rows, share, **across)]
        alike.append(variance_mass(rows, share, max_rollouts=len(batch) * n, **across))
        alike.append(variance_mass(rows.flatten(), share, offsets=own, **across))
        assert alike[0].equal(alike[1])
        assert alike[0].equal(alike[2])
        found.append(alike[0])
        whole = variance_mass(piece, share, offsets=edges, placement="global", **across)
        bounded = {"placement": "global", "max_rollouts": 60} | across
        assert whole.equal(variance_mass(piece, share, offsets=edges, **bounded))
        found.append(whole)
    assert variance_mass(piece, 0.5, **across)  # one group over all ranks
    return found


def test_across_ranks() -> None:
    """Each rank gets its part of the result of one process, or all of it if groups may lie on several ranks."""
    batch = torch.randint(0, 4, (9, 6)).float()
    batch[4], batch[5, 2] = 1.0, NAN
    groups, rollouts = [3, 0, 6], [20, 33, 1]
    found = world(3).run(of_ranks, batch, groups, rollouts)
    for place, share in enumerate(SHARES):
        expected = variance_mass(batch, share)
        assert torch.cat([each[2 * place] for each in found]).equal(expected)
        assert all(each[2 * place + 1].equal(expected) for each in found)
    said = [str(error) for error in world(3).outcomes(too_many)]
    assert said == ["max_rollouts: got 1 with 2 groups; takes at least as many"] * 3


def too_many(ranks: Ranks) -> None:
    d3s.variance_mass(torch.empty(2, 0), 0.5, max_rollouts=1, process_group=ranks.group)
