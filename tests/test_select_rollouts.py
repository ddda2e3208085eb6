"""select_rollouts: the choice of rollouts by a rule, in each group or over all groups."""

import math

import pytest
import torch
from helpers import INF, NAN, Segmented, assert_identical, awkward, random_generator, seeds, segmented, unwritten
from hypothesis import given
from hypothesis import strategies as st

from d3s_kernels import group_advantages, max_variance_select, reference, select_rollouts

RULES = ("max_variance", "highest", "largest_abs", "percentile", "random")
SCOPES = ("batch", "group")
rules, scopes = st.sampled_from(RULES), st.sampled_from(SCOPES)


@given(segmented(awkward), st.integers(1, 14), st.sampled_from([None, torch.int32, torch.int64]), rules, scopes, seeds)
def test_any_groups(case: Segmented, keep: int, dtype: torch.dtype | None, rule: str, scope: str, seed: int) -> None:
    def generator() -> torch.Generator | None:
        return random_generator(seed) if rule == "random" else None

    options = {"rule": rule, "offsets": case.offsets, "scope": scope, "mask": case.mask}
    given_keep = keep if dtype is None else torch.tensor(keep, dtype=dtype)
    assert_identical(
        select_rollouts(case.values, given_keep, generator=generator(), **options),
        reference.select_rollouts(case.values, keep, generator=generator(), **options),
    )


def test_the_batch_keeps_keep_times_the_groups() -> None:
    advantages = torch.randn(2, 5, 8)
    assert select_rollouts(advantages, 3).sum() == 3 * 10
    assert_identical(select_rollouts(advantages, 3), max_variance_select(advantages.flatten(), 30).view(2, 5, 8))


def test_empty_groups_count_as_groups() -> None:
    advantages, offsets = torch.randn(12), torch.tensor([0, 6, 6, 12])
    assert select_rollouts(advantages, 2, offsets=offsets).sum() == 6


def test_one_group() -> None:
    advantages = torch.randn(16)
    expected = max_variance_select(advantages, 4)
    for scope in ("batch", "group"):
        assert_identical(select_rollouts(advantages, 4, scope=scope), expected)


def test_groups_without_a_spread_give_their_places_to_others() -> None:
    """All their advantages are 0, in the middle of the pooled order. Selected by group they would take their share."""
    rewards = torch.zeros(6, 8)
    rewards[1, :4] = 1.0
    rewards[4, 4:] = 1.0
    advantages = group_advantages(rewards)
    assert select_rollouts(advantages, 2).sum(-1).tolist() == [0, 6, 0, 0, 6, 0]
    assert select_rollouts(advantages, 2, scope="group").sum(-1).tolist() == [2] * 6


def test_within_a_group_advantages_select_what_rewards_select() -> None:
    """Advantages are shifted and scaled rewards, so D3S-I keeps the rollouts that PODS keeps."""
    rewards = torch.randint(2, (50, 16)).float()
    assert_identical(select_rollouts(group_advantages(rewards), 4, scope="group"), max_variance_select(rewards, 4))


# ---- what every rule promises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rule", RULES)
def test_exactly_keep_of_what_is_usable(rule: str, scope: str) -> None:
    """Masked, NaN and infinite values are not usable. If there are fewer usable values than `keep`, all are kept."""
    advantages, mask = torch.randn(5, 12), torch.rand(5, 12) < 0.8
    advantages[:, 3], advantages[:, 5], advantages[:, 7] = NAN, INF, -INF
    usable = advantages.isfinite() & mask
    for keep in (1, 2, 4, 12, 2**63 - 1, torch.tensor(4, dtype=torch.int32), torch.tensor(2**63 - 1)):
        kept = select_rollouts(advantages, keep, rule=rule, scope=scope, mask=mask)
        assert not kept[~usable].any()
        if scope == "batch":
            assert kept.sum() == min(5 * int(keep), int(usable.sum()))
        else:
            assert_identical(kept.sum(-1), usable.sum(-1).clamp(max=int(keep)))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rule", ["max_variance", "highest", "largest_abs", "percentile"])
def test_padded_and_ragged_groups_agree(rule: str, scope: str) -> None:
    values, offsets = torch.randint(-3, 4, (6, 9)).float(), torch.arange(0, 55, 9, dtype=torch.int32)
    padded = select_rollouts(values, 4, rule=rule, scope=scope)
    assert_identical(select_rollouts(values.flatten(), 4, rule=rule, scope=scope, offsets=offsets).view(6, 9), padded)
    assert_identical(select_rollouts(values.T.contiguous().T, 4, rule=rule, scope=scope), padded)


@pytest.mark.parametrize("keep", [2**62, torch.tensor(2**62)])
@pytest.mark.parametrize("rule", RULES)
def test_more_than_can_be_counted_is_everything(rule: str, keep: int | torch.Tensor) -> None:
    """`keep` times the number of groups would overflow to 0."""
    for scope in SCOPES:
        assert select_rollouts(torch.randn(4, 6), keep, rule=rule, scope=scope).all()


@pytest.mark.parametrize("keep", [3, torch.tensor(3)])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 5)])
@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_keep(rule: str, shape: tuple[int, ...], keep: int | torch.Tensor) -> None:
    for scope in SCOPES:
        assert select_rollouts(torch.rand(shape), keep, rule=rule, scope=scope).shape == shape


@pytest.mark.parametrize("rule", RULES)
def test_the_inputs_are_not_written(rule: str) -> None:
    inputs = torch.randn(30), torch.rand(30) < 0.5, torch.tensor([0, 10, 30]), torch.tensor(3)
    with unwritten(*inputs):
        select_rollouts(inputs[0], inputs[3], rule=rule, mask=inputs[1], offsets=inputs[2])


def test_a_choice_has_no_gradient() -> None:
    for rule in RULES:
        assert not select_rollouts(torch.randn(4, 6, requires_grad=True), 2, rule=rule).requires_grad


# ---- single rules ----------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lower_index() -> None:
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, 1.0, -1.0])
    assert select_rollouts(values, 3, rule="highest").nonzero().flatten().tolist() == [0, 2, 4]
    assert select_rollouts(values, 3, rule="largest_abs").nonzero().flatten().tolist() == [0, 1, 4]
    assert select_rollouts(torch.zeros(7), 3, rule="percentile").nonzero().flatten().tolist() == [1, 3, 5]


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


def test_one_percentile_is_the_lower_median() -> None:
    values = torch.randn(20, 8)
    assert_identical(values[select_rollouts(values, 1, rule="percentile", scope="group")], values.median(-1).values)


def test_percentiles_of_many_groups() -> None:
    values, offsets = torch.randint(50, (40_000,)).bfloat16(), torch.tensor([0, 0, 9000, 9001, 30_000, 40_000])
    for scope in SCOPES:
        options = {"rule": "percentile", "offsets": offsets, "scope": scope}
        assert_identical(select_rollouts(values, 999, **options), reference.select_rollouts(values, 999, **options))


@pytest.mark.slow_elsewhere("that draws are even there too, which no kernel makes")
def test_random_subsets_are_equally_likely() -> None:
    """All 20 subsets of three from six, 30,000 draws: chi-squared (19 degrees) exceeds 60 once in 250,000 runs."""
    kept = select_rollouts(torch.zeros(30_000, 6), 3, rule="random", scope="group")
    subsets = (kept * 2 ** torch.arange(6)).sum(-1).bincount()
    found = subsets[subsets > 0].double()
    assert len(found) == math.comb(6, 3)
    assert (found - 1500).square().sum() / 1500 < 60


def test_random_follows_its_generator() -> None:
    values = torch.zeros(4, 50)

    def draw(seed: int) -> torch.Tensor:
        return select_rollouts(values, 10, rule="random", generator=random_generator(seed))

    assert_identical(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    generator = random_generator(1)
    first, second = (select_rollouts(values, 10, rule="random", generator=generator) for _ in range(2))
    assert not torch.equal(first, second)


def test_random_follows_torchs_seed() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(5)
        return select_rollouts(torch.zeros(200), 50, rule="random")

    assert_identical(draw(), draw())
