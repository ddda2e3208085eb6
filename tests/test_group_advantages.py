"""group_advantages: GRPO's (R - mean) / (std + eps), with unscorable rewards left out."""

import math

import pytest
import torch
from helpers import DTYPES, INF, NAN, assert_same_bits, cut
from torch import Tensor

from d3s_kernels import group_advantages, groups_without_spread, reference

SCALES = ("group", "batch", "none")


def assert_advantages(actual: Tensor, expected: Tensor) -> None:
    """Both sides compute in float64, so only the last rounding and the order of a sum may differ."""
    torch.testing.assert_close(actual, expected, rtol=2**-22, atol=1e-9)


def test_ddof() -> None:
    """One that is not below the size of a group leaves a deviation of 0."""
    found = [group_advantages(torch.tensor([0.0, 0.0, 3.0]), eps=0.0, ddof=ddof)[2].item() for ddof in (0, 1, 2)]
    assert found == pytest.approx([math.sqrt(2), 2 / math.sqrt(3), 2 / math.sqrt(6)], rel=1e-6)
    assert group_advantages(torch.tensor([0.0, 1.0]), eps=0.5, ddof=2).tolist() == [-1.0, 1.0]


def test_rewards_far_from_zero() -> None:
    """Rewards differ by 0.01 around 1000. In float32 their squares would be lost in that of the mean."""
    values = torch.where(torch.rand(50, 16) < 0.5, 1000.01, 999.99)
    exact = values.double()
    expected = (exact - exact.mean(-1, keepdim=True)) / (exact.std(-1, keepdim=True) + 1e-4)
    mixed = (values != values[:, :1]).any(-1)
    assert_advantages(group_advantages(values)[mixed], expected[mixed].float())


# ---- equal rewards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_rounding_errors_are_no_advantages(ddof: int, scale: str) -> None:
    """The sums of the same three rewards in two orders would have the advantages -1 and 1. An infinite reward beside
    them makes the deviation of the batch NaN, and a group with one has advantages of its own.
    """
    a, b, c = torch.tensor([0.1, 0.2, 0.35])
    values = torch.stack([a + b + c, c + b + a, a * NAN, a, b, a * INF, a * INF])
    assert values[0] != values[1]
    for ends in ([0, 3, 5], [0, 3, 5, 7]):
        found = group_advantages(values[: ends[-1]], offsets=torch.tensor(ends), scale=scale, eps=0.0, ddof=ddof)
        assert_same_bits(found[:3], torch.zeros(3))
        assert (found[3:] != 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_group_has_advantages_where_it_has_a_spread(dtype: torch.dtype) -> None:
    """Rewards of several sizes lie a few of their rounding steps apart: fewer than count as equal, and more."""
    steps = (14 * torch.rand(40, 3, 1) * torch.rand(40, 3, 5)).floor().double()
    steps[0, :, 0], steps[0, :, 1:], steps[1] = 0, 13, 0  # whatever is drawn: one group of each kind
    sizes = torch.tensor([0.01, 1.0, -700.0]).double().view(3, 1)
    rewards = (sizes * (1 + torch.finfo(dtype).eps * steps)).to(dtype)
    same = groups_without_spread(rewards)
    assert same.any()
    assert not same.all()
    assert torch.equal(same, reference.groups_without_spread(rewards))
    for scale in SCALES:
        assert torch.equal((group_advantages(rewards, eps=0.0, scale=scale) == 0).all(-1), same)


# ---- dtypes ----------------------------------------------------------------------------------------------------------

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
def test_rewards_that_are_no_floats(dtype: str) -> None:
    rewards = torch.randint(2, (20, 3)).to(getattr(torch, dtype))
    assert_same_bits(group_advantages(rewards), group_advantages(rewards.float()))
    assert torch.equal(groups_without_spread(rewards), groups_without_spread(rewards.float()))


@pytest.mark.parametrize("first", [2**24, 10**9, -(10**12)])
def test_rewards_that_float32_does_not_hold(first: int) -> None:
    rewards = first + torch.arange(4)
    for values in (rewards, rewards.double()):
        assert not groups_without_spread(values)
        for scale in SCALES:
            found = group_advantages(values.view(2, 2), scale=scale)
            assert_same_bits(found, group_advantages(torch.arange(4.0).view(2, 2), scale=scale))


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_one_long_and_many_ragged_groups() -> None:
    values = torch.randn(100_000)
    assert_advantages(group_advantages(values), reference.group_advantages(values))
    offsets = cut(100_000, 300)
    assert_advantages(group_advantages(values, offsets=offsets), reference.group_advantages(values, offsets=offsets))


@pytest.mark.parametrize("length", [5, 200, 511, 512, 513, 700])
def test_a_groups_bits_do_not_depend_on_the_other_groups(length: int) -> None:
    """Much larger numbers cancel in the group's mean, so it shows the order in which they were added."""
    rewards = torch.randn(length)
    rewards[::3] += 1e16 * torch.randn(len(rewards[::3]))
    alone = group_advantages(rewards, offsets=torch.tensor([0, length]), scale="none")
    assert_same_bits(group_advantages(rewards.view(1, -1), scale="none")[0], alone)
    for others in ([1] * 900, [3000], [0] * 50):
        edges = torch.tensor([0, *others, length, *others]).cumsum(0)
        before = sum(others)
        many = torch.cat([torch.randn(before), rewards, torch.randn(before)])
        among = group_advantages(many, offsets=edges, scale="none")
        assert_same_bits(among[before : before + length], alone)
