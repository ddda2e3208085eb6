"""variance_mass: the fewest groups that have a share of the variance."""

from __future__ import annotations

import math

import pytest
import torch
from cases.draw import draws
from cases.table import FUNCTIONS
from ranks import Ranks, world
from torch._subclasses.fake_tensor import FakeTensorMode

import d3s_kernels as d3s
from d3s_kernels import groups_without_spread, variance_mass


def test_the_whole_share_is_that_of_all_groups_with_a_spread() -> None:
    for draw in draws():
        given = FUNCTIONS["groups_without_spread"].draw(draw)
        rewards, offsets = given["rewards"], given["offsets"]
        found = variance_mass(rewards, 1.0, offsets=offsets)
        assert found.equal(~groups_without_spread(rewards, offsets=offsets))


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


def too_many(ranks: Ranks) -> None:
    d3s.variance_mass(torch.empty(2, 0), 0.5, max_rollouts=1, process_group=ranks.group)


def test_a_bound_below_the_number_of_groups_is_refused_by_all_ranks() -> None:
    said = [str(error) for error in world(3).outcomes(too_many)]
    assert said == ["max_rollouts: got 1 with 2 groups; takes at least as many"] * 3
