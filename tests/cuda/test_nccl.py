"""Selections and a shared vocabulary on several GPUs over NCCL give what one GPU gives that holds everything."""

from __future__ import annotations

import pytest
import torch
from cases.draw import Draw
from every_op import nothing_waits
from helpers import assert_entropy, assert_identical, assert_logprob
from ranks import Ranks, World

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels.distributed import exchange_rows, plan_rows, vocab_parallel_logprob_entropy

GPUS = torch.cuda.device_count()

pytestmark = pytest.mark.skipif(GPUS < 2, reason="takes two GPUs: NCCL has one rank for each")


def choose(ranks: Ranks, seed: int) -> None:
    """Every rank draws the same batch and passes its own part."""
    device = torch.device("cuda", ranks.rank)
    generator = torch.Generator().manual_seed(seed)
    lengths = Draw(seed).parts(100_000, ranks.size)
    entropy = torch.rand(100_000, generator=generator).mul(50).round()
    advantages = torch.randn(100_000, generator=generator)
    whole = d3s.select_tokens(entropy, advantages, 0.1)
    own = [values.split(lengths)[ranks.rank].to(device) for values in (entropy, advantages, whole.mask)]
    with nothing_waits():
        found = d3s.select_tokens(*own[:2], 0.1, process_group=ranks.group)
    assert_identical(found.mask, own[2])
    assert_identical(found.count.cpu(), whole.count)
    assert_identical(found.threshold.cpu(), whole.threshold)

    rewards = torch.randint(2, (ranks.size * 8, 16), generator=generator).float()
    mine = rewards.split(8)[ranks.rank].to(device)
    with nothing_waits():
        kept = d3s.select_rollouts(mine, 4, process_group=ranks.group, max_rollouts=128)
        equal = d3s.select_rollouts(mine, 4, process_group=ranks.group, max_rollouts=128, equal_rows=True)
    assert_identical(kept.cpu(), d3s.select_rollouts(rewards, 4).split(8)[ranks.rank])
    assert int(equal.sum()) == 32
    plan = plan_rows(kept.flatten(), ranks.group)
    assert len(exchange_rows(mine.flatten(), plan, ranks.group)) == plan.rows == 32


def share_the_vocabulary(ranks: Ranks, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, 5000, generator=generator) * 3
    labels = torch.randint(5000, (64,), generator=generator)
    edges = torch.tensor([0, *Draw(seed).parts(5000, ranks.size)]).cumsum(0).tolist()
    first, end = edges[ranks.rank], edges[ranks.rank + 1]
    device = torch.device("cuda", ranks.rank)
    own = logits[:, first:end].to(device).requires_grad_()
    with nothing_waits():
        logprob, entropy = vocab_parallel_logprob_entropy(own, labels.to(device), first, ranks.group)
    (logprob + entropy).sum().backward()
    leaf = logits.double().requires_grad_()
    expected = reference.logprob_entropy(leaf, labels)
    sum(expected).sum().backward()
    assert_logprob(logprob.detach().cpu(), expected[0].detach())
    assert_entropy(entropy.detach().cpu(), expected[1].detach())
    torch.testing.assert_close(own.grad.cpu().double(), leaf.grad[:, first:end], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", [choose, share_the_vocabulary])
def test_by_nccl(task: object) -> None:
    together = World(min(GPUS, 4), backend="nccl")
    try:
        for seed in torch.randint(2**31, (5,)).tolist():
            together.run(task, seed)  # type: ignore[arg-type]
    finally:
        together.end()
