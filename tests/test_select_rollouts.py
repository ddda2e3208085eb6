"""select_rollouts: the choice of rollouts by a rule, in each group or over all groups."""

import math

import pytest
import torch
from helpers import assert_identical, random_generator

from d3s_kernels import group_advantages, max_variance_select, reference, select_rollouts
from d3s_kernels.selection import choose_rollouts

RULES = ("max_variance", "highest", "largest_abs", "percentile", "random")
SCOPES = ("batch", "group")


def test_within_a_group_advantages_select_what_rewards_select() -> None:
    """Advantages are shifted and scaled rewards, so D3S-I keeps the rollouts that PODS keeps."""
    rewards = torch.randint(2, (50, 16)).float()
    assert_identical(select_rollouts(group_advantages(rewards), 4, scope="group"), max_variance_select(rewards, 4))


# ---- what every rule promises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [2**62, torch.tensor(2**62), 2**63 - 1, torch.tensor(2**63 - 1)])
@pytest.mark.parametrize("rule", RULES)
def test_more_than_can_be_counted_is_everything(rule: str, keep: int | torch.Tensor) -> None:
    """`keep` times the number of groups would overflow to 0."""
    for scope in SCOPES:
        assert select_rollouts(torch.randn(4, 6), keep, rule=rule, scope=scope).all()


# ---- single rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 30))
def test_percentiles_are_the_nearest_ranks(n: int) -> None:
    """Exhaustive: the rank nearest to each quantile, and the lower one of two."""
    shuffled = torch.randperm(n)
    for k in range(1, n + 1):
        quantiles = [(2 * i + 1) * (n - 1) for i in range(k)]  # in units of 1 / (2 k)
        nearest = [min(range(n), key=lambda r: (abs(2 * k * r - q), r)) for q in quantiles]
        assert len(set(nearest)) == k
        kept = select_rollouts(shuffled.float(), k, rule="percentile")
        assert shuffled[kept].sort().values.tolist() == nearest


def test_percentiles_of_many_groups() -> None:
    values, offsets = torch.randint(50, (40_000,)).bfloat16(), torch.tensor([0, 0, 9000, 9001, 30_000, 40_000])
    for scope in SCOPES:
        options = {"rule": "percentile", "offsets": offsets, "scope": scope}
        assert_identical(select_rollouts(values, 999, **options), reference.select_rollouts(values, 999, **options))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_taken(dtype: torch.dtype) -> None:
    """Lengths, for instance: those of a mask's rows are its sum."""
    lengths = torch.tensor([[210, 1, 0], [7, 0, 8]]).to(dtype)
    for rule in set(RULES) - {"random"}:
        options = {"rule": rule, "scope": "group"}
        assert_identical(select_rollouts(lengths, 2, **options), select_rollouts(lengths.float(), 2, **options))
    assert_identical(max_variance_select(lengths, 1), max_variance_select(lengths.float(), 1))
    found = choose_rollouts(lengths.flatten(), 1, groups="abbccc")
    assert_identical(found, choose_rollouts(lengths.flatten().float(), 1, groups="abbccc"))


@pytest.mark.slow_elsewhere("that draws are even there too, which no kernel makes")
def test_random_subsets_are_equally_likely() -> None:
    """All 20 subsets of three from six, 30,000 draws: chi-squared (19 degrees) exceeds 60 once in 250,000 runs."""
    kept = select_rollouts(torch.zeros(30_000, 6), 3, rule="random", scope="group")
    subsets = (kept * 2 ** torch.arange(6)).sum(-1).bincount()
    found = subsets[subsets > 0].double()
    assert len(found) == math.comb(6, 3)
    assert (found - 1500).square().sum() / 1500 < 60


def test_random_follows_its_generator_or_torchs_seed() -> None:
    def draw(generator: torch.Generator | None = None) -> torch.Tensor:
        torch.manual_seed(5)
        return select_rollouts(torch.zeros(4, 50), 10, rule="random", generator=generator)

    generator = random_generator(1)
    first, second = draw(generator), draw(generator)
    assert_identical(draw(random_generator(1)), first)
    assert_identical(draw(), draw())
    for other in (second, draw(random_generator(2)), draw()):
        assert not torch.equal(first, other)
