"""max_variance_select over many groups, and over one pool of rollouts."""

import pytest
import torch

import d3s_kernels as d3s

from . import inputs, peers
from .harness import Contest, describe
from .sizes import Sizes


@pytest.mark.parametrize("where", ["groups", "pool"])
def test_max_variance_select(contest: Contest, sizes: Sizes, where: str) -> None:
    shape, keep = (sizes.groups, sizes.keep) if where == "groups" else ((1, sizes.pool), sizes.pool_keep)
    values = inputs.advantages(*shape)
    contest(
        f"max_variance_select, {where}",
        f"{describe(*shape)}, keep {keep:,}",
        lambda values: d3s.max_variance_select(values, keep),
        inputs=(values,),
        peers={
            "vectorised PyTorch": lambda values: peers.max_variance(values, keep),
            "PODS's loop": peers.looping(lambda values: peers.pods(values, keep)),
        },
        agree=same_variance(values, keep),
    )


def test_select_rollouts(contest: Contest, sizes: Sizes) -> None:
    advantages = inputs.advantages(*sizes.groups)
    pooled = advantages.view(1, -1)
    kept = sizes.keep * len(advantages)
    contest(
        "select_rollouts, over all groups",
        f"{describe(*sizes.groups)}, keep {kept:,}",
        lambda advantages: d3s.select_rollouts(advantages, sizes.keep),
        inputs=(advantages,),
        peers={
            "vectorised PyTorch": lambda advantages: peers.max_variance(advantages.view(1, -1), kept).view_as(
                advantages
            )
        },
        agree=same_variance(pooled, kept),
    )


def same_variance(values: torch.Tensor, keep: int):
    """Subsets agree if their variances agree: subsets may tie, and float32 sums may miss the best subset slightly."""

    def variance(mask: torch.Tensor) -> torch.Tensor:
        return values[mask.reshape(values.shape)].view(len(values), keep).double().var(dim=-1)

    def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        worst = (variance(theirs) / variance(ours) - 1).abs().max()
        assert worst <= 1e-5, f"{name}: a variance is {worst:.2g} off"

    return agree
