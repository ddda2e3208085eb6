"""What it costs to have the same number of kept rollouts on every rank. If the choice is restricted to equal numbers,
variance is lost. If the choice is not restricted, kept rows must move to other ranks.

    python -m benchmarks.equal_rows      prints a table of means over 200 batches; takes half a minute

Every rank has 8 prompts of 16 rollouts, and half of all rollouts are kept. Nothing is timed, and no processes are
started: each rank is a row of a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d3s_kernels import group_advantages, max_variance_select
from d3s_kernels.distributed.plan_rows import _moves
from d3s_kernels.distributed.rollouts import most_varied

PROMPTS, ROLLOUTS, KEEP = 8, 16, 8
RANKS = (2, 8, 64)
DRAWS = 200
COLUMNS = (
    "advantages",
    "ranks",
    "variance lost by `equal_rows`",
    "by each rank choosing alone",
    "rows of the fullest rank, over the mean",
    "kept rows that `plan_rows` moves",
)


def binary(ranks: int, generator: torch.Generator) -> Tensor:
    """Advantages from rewards of 0 and 1; the success rates of the prompts are uniform."""
    solved = torch.rand(ranks * PROMPTS, 1, generator=generator)
    rewards = (torch.rand(ranks * PROMPTS, ROLLOUTS, generator=generator) < solved).float()
    return group_advantages(rewards).view(ranks, -1)


def normal(ranks: int, generator: torch.Generator) -> Tensor:
    return torch.randn(ranks, PROMPTS * ROLLOUTS, generator=generator)


def one_batch(advantages: Tensor) -> tuple[float, float, float, float]:
    """Returns four numbers. The first two are shares of the variance that are lost if all ranks must keep the same
    number of rows: first if one choice is made for all ranks together, then if each rank chooses alone. The last two
    are for a choice without this restriction: the largest number of rows on a rank, divided by the mean number; and the
    share of the kept rows that move.
    """
    ranks, each = len(advantages), KEEP * PROMPTS
    best = max_variance_select(advantages.view(-1), each * ranks).view_as(advantages)
    even = most_varied(advantages, torch.tensor(each * ranks))
    alone = max_variance_select(advantages, each)
    assert int(even.sum()) == int(alone.sum()) == int(best.sum()) == each * ranks
    most = variance(advantages[best])
    held = best.sum(1).tolist()
    moved = sum(map(sum, _moves(held, each)))
    return (
        1 - variance(advantages[even]) / most,
        1 - variance(advantages[alone]) / most,
        max(held) / each,
        moved / (each * ranks),
    )


def variance(kept: Tensor) -> float:
    return kept.double().var(correction=0).item()


def main() -> None:
    generator = torch.Generator().manual_seed(20_250_922)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for draw in (binary, normal):
        for ranks in RANKS:
            shares = torch.tensor([one_batch(draw(ranks, generator)) for _ in range(DRAWS)], dtype=torch.float64)
            even, alone, fullest, moved = shares.mean(0).tolist()
            print(f"| {draw.__name__} | {ranks} | {even:.2%} | {alone:.2%} | {fullest:.2f} | {moved:.1%} |", flush=True)


if __name__ == "__main__":
    main()
