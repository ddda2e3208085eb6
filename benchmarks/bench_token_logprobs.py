"""linear_token_logprobs: the log-probabilities of a student at the ids of a teacher, and the loss that follows."""

from collections.abc import Callable

import pytest
import torch

import d3s_kernels as d3s

from . import inputs, trl_peers
from .bench_head import close_in_norm, size_of, step_of
from .harness import Contest, close
from .sizes import Sizes
from .targets import GIVEN_IDS, GIVEN_IDS_STEP, HEAD_ALONE, TRLS_DISTILLATION

K = 64
Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def heads(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, Head, Head, Head | None]:
    """Hidden states and weight, and three functions of them: our head alone, our loss, and TRL's loss: the forward KL
    from a teacher, with a bucket for all ids that are not given.
    """
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    generator = torch.Generator(hidden.device).manual_seed(0)
    ids = torch.randint(len(weight) // K, (len(hidden), K), generator=generator, device=hidden.device)
    ids += len(weight) // K * torch.arange(K, device=hidden.device)  # all ids of a row differ
    teacher = torch.randn(len(hidden), K, generator=generator, device=hidden.device).log_softmax(-1) - 0.1

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = d3s.linear_token_logprobs(hidden, weight, ids)
        p = teacher.exp()
        tail = 1 - p.sum(-1)
        return (p * (teacher - found.logprobs)).sum() + (tail * (tail.log() - found.tail_logprob)).sum()

    def alone(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return d3s.linear_logprob_entropy(hidden, weight, labels)[0].sum()

    trl = trl_peers.imported("trl.experimental.async_distillation.async_distillation_trainer")

    def trls(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        every, size = torch.ones_like(ids, dtype=torch.bool), trl._CHUNKED_LM_HEAD_CHUNK_SIZE
        return trl._chunked_jsd_loss(
            hidden, weight, None, 1.0, None, ids, teacher, every, 0.0, 1.0, True, None, 0, size
        )[0]

    return hidden, weight, alone, ours, trls if trl else None


def test_forward(contest: Contest, heads: tuple) -> None:
    hidden, weight, alone, ours, trls = heads
    contest(
        GIVEN_IDS,
        size_of(hidden, weight),
        lambda: ours(hidden, weight),
        peers={TRLS_DISTILLATION: trls and (lambda: trls(hidden, weight))},
        yardsticks={HEAD_ALONE: lambda: alone(hidden, weight)},
        agree=close(0.01 * len(hidden)),
    )


def test_both_ways(contest: Contest, heads: tuple) -> None:
    hidden, weight, alone, ours, trls = heads
    one = torch.ones((), device=hidden.device)
    contest(
        GIVEN_IDS_STEP,
        size_of(hidden, weight),
        step_of(ours, hidden, weight, one),
        peers={TRLS_DISTILLATION: trls and step_of(trls, hidden, weight, one)},
        yardsticks={HEAD_ALONE: step_of(alone, hidden, weight, one)},
        agree=close_in_norm(0.02),
    )
