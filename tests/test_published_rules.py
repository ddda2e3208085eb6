"""The rules against the authors' code, rewritten here from its description. test_max_variance.py proves that of PODS.

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
