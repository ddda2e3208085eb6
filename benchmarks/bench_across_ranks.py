"""Times selection across two ranks; each rank is a process with one thread. This selection is compared with two
alternatives. In the first, as in trainers, all values are gathered, and then every rank selects from all values. In the
second, each rank selects only from its own values.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.distributed import vocab_parallel_logprob_entropy

from . import inputs
from .harness import OURS, Contest, close, describe, same_kept
from .second_rank import Works, with_second_rank
from .sizes import Sizes

RATIO = 0.10
GATHERED, OWN = "gather, then select", "each rank's own"


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyones = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(everyones, values, group=group)
    return torch.cat(everyones)


def tokens(rank: int, group: dist.ProcessGroup, sequences: int, length: int) -> Works:
    """A batch of completions on each rank."""
    every = torch.arange(sequences) + rank  # different rows on each rank
    entropy, advantages = inputs.entropies(sequences, length)[every % sequences], inputs.advantages(sequences)
    mask = inputs.right_padded(sequences, length)

    def from_all() -> Tensor:
        everyones = gathered(entropy.masked_fill(~mask, torch.nan), group)
        kept = d3s.select_tokens(everyones, gathered(advantages, group), RATIO).mask
        return kept[rank * sequences : (rank + 1) * sequences]

    return {
        OURS: lambda: d3s.select_tokens(entropy, advantages, RATIO, mask=mask, process_group=group).mask,
        GATHERED: from_all,
        OWN: lambda: d3s.select_tokens(entropy, advantages, RATIO, mask=mask).mask,
    }


def rollouts(rank: int, group: dist.ProcessGroup, groups: int, of_each: int, keep: int) -> Works:
    advantages = inputs.advantages(2 * groups, of_each)[rank * groups : (rank + 1) * groups].contiguous()

    def from_all() -> Tensor:
        return d3s.select_rollouts(gathered(advantages, group), keep)[rank * groups : (rank + 1) * groups]

    most = advantages.numel()
    return {
        OURS: lambda: d3s.select_rollouts(advantages, keep, process_group=group, max_rollouts=most),
        GATHERED: from_all,
        OWN: lambda: d3s.select_rollouts(advantages, keep),
    }


def vocabulary(rank: int, group: dist.ProcessGroup, sizes: Sizes) -> Works:
    """Half of the vocabulary on each rank."""
    logits, labels = inputs.logits_and_labels(sizes)
    half = sizes.vocabulary // 2
    own = logits[..., rank * half : (rank + 1) * half].contiguous()

    def from_all() -> tuple[Tensor, Tensor]:
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own, group=group)
        return d3s.logprob_entropy(torch.cat(both, -1), labels)

    return {
        OURS: lambda: vocab_parallel_logprob_entropy(own, labels, rank * half, group),
        GATHERED: from_all,
        OWN: lambda: d3s.entropy(own),
    }


def _hold(contest: Contest, name: str, size: str, works: Works, agree: object) -> None:
    contest(
        name, size, works[OURS], peers={GATHERED: works[GATHERED]}, yardsticks={OWN: works[OWN]}, agree=agree,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_cpu() -> None:
    if inputs.contests_of != "cpu":
        pytest.skip("two ranks take two GPUs; on the CPU they are two processes")


def test_tokens(contest: Contest, sizes: Sizes) -> None:
    with with_second_rank(tokens, *sizes.batch) as works:
        _hold(contest, "select_tokens on 2 ranks", f"2 x {describe(*sizes.batch)}", works, same_kept(0))


def test_rollouts(contest: Contest, sizes: Sizes) -> None:
    with with_second_rank(rollouts, *sizes.groups, sizes.keep) as works:
        _hold(contest, "select_rollouts on 2 ranks", f"2 x {describe(*sizes.groups)}", works, same_kept(0))


def test_vocabulary(contest: Contest, sizes: Sizes) -> None:
    size = describe(sizes.sequences * sizes.tokens, sizes.vocabulary // 2)
    with with_second_rank(vocabulary, sizes) as works:
        _hold(contest, "logprob_entropy, vocabulary on 2 ranks", f"2 x {size}", works, close(2e-5))
