"""The rules against the authors' code, rewritten here from its description, and against what a paper proves.

trainers/test_trl_rollouts.py compares with TRL's own code.
"""

import math

import pytest
import torch
from torch import Tensor

from d3s_kernels import group_advantages, select_rollouts, select_tokens

GROUPS, N = 40, 12
KINDS = ["distinct", "binary", "graded", "equal"]


def rewards_of_kind(kind: str) -> Tensor:
    return {
        "distinct": lambda: torch.randn(GROUPS, N),
        "binary": lambda: (torch.rand(GROUPS, N) < torch.rand(GROUPS, 1)).float(),
        "graded": lambda: torch.randint(5, (GROUPS, N)) / 4,
        "equal": lambda: torch.full((GROUPS, N), 0.7),
    }[kind]()


# ---- PODS ------------------------------------------------------------------------------------------------------------


def published_max_variance(rewards: Tensor, m: int) -> Tensor:
    """PODS's selection in one group. It starts with the m highest; then, with more and more of the highest beside the
    lowest, it takes a candidate whose variance is strictly greater."""
    descending = rewards.sort(descending=True).values
    best = descending[:m]
    for highs in range(m):
        candidate = torch.cat([descending[:highs], descending[highs - m :]])
        if candidate.var() > best.var():
            best = candidate
    return best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [2, 3, 6, 11, 12])
def test_max_variance_of_pods(kind: str, m: int) -> None:
    rewards = rewards_of_kind(kind)
    kept = select_rollouts(rewards, m, scope="group")
    for row, chosen in zip(rewards, kept, strict=True):
        published, ours = published_max_variance(row.double(), m), row[chosen].double()
        torch.testing.assert_close(ours.var(), published.var(), rtol=1e-9, atol=1e-12)
        if kind == "distinct":  # else several subsets vary equally, and rounding decides in .var()
            assert ours.sort().values.tolist() == published.sort().values.tolist()


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 11])
def test_binary_rewards_keep_half_of_each(m: int) -> None:
    """PODS's theorem 2. Where there are too few of one value, all of these; an odd one is from below."""
    ones = torch.arange(N + 1)
    rewards = torch.stack([torch.randperm(N) < count for count in ones]).float()
    kept = select_rollouts(rewards, m, scope="group")
    expected = torch.minimum(ones, (m - N + ones).clamp(min=m // 2))
    assert (rewards * kept).sum(-1).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_pods(kind: str) -> None:
    """PODS computes advantages from the kept subset."""
    rewards = rewards_of_kind(kind)
    kept = select_rollouts(rewards, 4, scope="group")
    advantages = group_advantages(rewards.masked_fill(~kept, torch.nan))
    subset = rewards[kept].view(GROUPS, 4)
    published = (subset - subset.mean(-1, keepdim=True)) / (subset.std(-1, keepdim=True) + 1e-4)
    torch.testing.assert_close(advantages[kept].view(GROUPS, 4), published, rtol=1e-4, atol=1e-3)
    assert (advantages[~kept] == 0).all()


@pytest.mark.parametrize("kind", ["distinct", "binary", "graded"])
def test_the_order_of_d3s(kind: str) -> None:
    """D3S computes advantages from the full group and selects over all groups: no split of the pool varies more."""
    rewards = rewards_of_kind(kind)
    kept = select_rollouts(advantages := group_advantages(rewards), 3)
    pool = advantages.flatten().double().sort().values
    count = 3 * GROUPS
    assert kept.sum() == count
    best = max(torch.cat([pool[:low], pool[len(pool) - (count - low) :]]).var() for low in range(count + 1))
    torch.testing.assert_close(advantages[kept].double().var(), best, rtol=1e-9, atol=0)


# ---- D3S, Lemma 1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["distinct", "binary", "graded"])
@pytest.mark.parametrize(("ddof", "least"), [(1, 1.0), (0, N / (N - 1))])
def test_a_subset_of_a_standardised_group_can_always_vary_by_one(kind: str, ddof: int, least: float) -> None:
    """This holds for every size from two on with the sample variance: its mean over subsets is the full group's."""
    advantages = group_advantages(rewards_of_kind(kind), eps=0.0, ddof=ddof)
    advantages = advantages[(advantages != 0).any(-1)]  # a group without a spread cannot be standardised
    for m in range(2, N + 1):
        kept = select_rollouts(advantages, m, scope="group")
        assert (advantages[kept].view(-1, m).double().var(-1) >= least * (1 - 1e-6)).all()


# ---- CPPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.3, 0.5, 0.875])
@pytest.mark.parametrize("kind", KINDS)
def test_pruning_of_cppo(kind: str, p: float) -> None:
    """CPPO drops the int(N P) smallest |A|, of each group or of the whole batch."""
    advantages = group_advantages(rewards_of_kind(kind))
    for batch in (advantages, advantages.view(1, -1)):
        size = batch.shape[-1]
        dropped = int(size * p)
        kept = select_rollouts(batch, size - dropped, rule="largest_abs", scope="group")
        sizes = batch.abs()  # which are equal for choices that differ among ties
        assert sizes[kept].view(-1, size - dropped).sort(-1).values.equal(sizes.sort(-1).values[:, dropped:])


# ---- GFPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["shortest", "reward per token"])
def test_filtering_of_gfpo(metric: str) -> None:
    """GFPO keeps the k best of a metric. Their advantages use their own mean and population deviation; the others get
    0."""
    rewards, k = rewards_of_kind("graded"), 5
    lengths = (torch.randperm(GROUPS * N) + 1.0).view(GROUPS, N)
    values = -lengths if metric == "shortest" else (rewards + 0.1) / lengths
    kept = select_rollouts(values, k, rule="highest", scope="group")
    best = values.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values  # of equal ones the first
    assert kept.nonzero()[:, 1].view(GROUPS, k).equal(best)

    advantages = group_advantages(rewards.masked_fill(~kept, torch.nan), eps=0.0, ddof=0)
    subset = rewards[kept].view(GROUPS, k)
    deviation = subset.std(-1, correction=0, keepdim=True)
    spread = (deviation > 0).squeeze(-1)
    published = ((subset - subset.mean(-1, keepdim=True)) / deviation)[spread]
    torch.testing.assert_close(advantages[kept].view(GROUPS, k)[spread], published, rtol=1e-4, atol=1e-5)
    assert (advantages[~kept] == 0).all()


# ---- high-entropy tokens (80/20) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2, 0.25, 0.5])
@pytest.mark.parametrize("tokens", [1, 7, 100, 1003])
def test_high_entropy_tokens(ratio: float, tokens: int) -> None:
    """The official code takes max(1, int(n * ratio + 0.9999)) of all response tokens, by torch.topk."""
    mask = torch.zeros(6, tokens, dtype=torch.bool)
    mask.view(-1)[torch.randperm(6 * tokens)[:tokens]] = True
    entropy = torch.where(mask, torch.rand(6, tokens), 9.0)
    count = max(1, int(tokens * ratio + 0.9999))
    published = entropy[mask].topk(count).values
    found = select_tokens(entropy, None, ratio, rule="entropy", mask=mask)
    assert found.count == count == max(1, math.ceil(round(tokens * ratio, 6)))
    assert found.entropy[found.mask].sort(descending=True).values.equal(published)
