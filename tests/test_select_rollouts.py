"""select_rollouts: max_variance_select of advantages, in each group or over all of them."""

import torch
from helpers import NAN, Segmented, assert_identical, awkward, segmented
from hypothesis import given
from hypothesis import strategies as st

from d3s_kernels import group_advantages, max_variance_select, reference, select_rollouts


@given(segmented(awkward), st.integers(1, 14), st.sampled_from(["batch", "group"]), st.booleans())
def test_any_groups(case: Segmented, keep: int, scope: str, as_tensor: bool) -> None:
    options = {"offsets": case.offsets, "scope": scope}
    given_keep = torch.tensor(keep) if as_tensor else keep
    assert_identical(
        select_rollouts(case.values, given_keep, **options), reference.select_rollouts(case.values, keep, **options)
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
    """All their advantages are 0, in the middle of the pooled order; within groups they would take their share."""
    rewards = torch.zeros(6, 8)
    rewards[1, :4] = 1.0
    rewards[4, 4:] = 1.0
    advantages = group_advantages(rewards)
    assert select_rollouts(advantages, 2).sum(-1).tolist() == [0, 6, 0, 0, 6, 0]
    assert select_rollouts(advantages, 2, scope="group").sum(-1).tolist() == [2] * 6


def test_within_a_group_advantages_select_what_rewards_select() -> None:
    """Advantages are rewards shifted and scaled: D3S-I keeps the rollouts that PODS keeps."""
    rewards = torch.randint(2, (50, 16)).float()
    assert_identical(select_rollouts(group_advantages(rewards), 4, scope="group"), max_variance_select(rewards, 4))


def test_unusable_advantages_are_never_kept() -> None:
    advantages = torch.randn(4, 8)
    advantages[:, 3] = NAN
    assert not select_rollouts(advantages, 8)[:, 3].any()
