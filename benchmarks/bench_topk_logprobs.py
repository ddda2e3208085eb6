"""topk_logprobs and linear_topk_logprobs: the k largest log-probabilities, as a teacher of a student makes them."""

import pytest
import torch

import d3s_kernels as d3s

from . import inputs
from .harness import Contest, close, describe
from .sizes import Sizes
from .targets import HEAD_ALONE, TOPK_AND_LOGSUMEXP, largest, largest_of_head


def in_torch(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.topk(k).values.float() - logits.logsumexp(-1, keepdim=True).float()


@pytest.mark.parametrize("k", [64, 256])
def test_of_logits(contest: Contest, sizes: Sizes, k: int) -> None:
    logits, _ = inputs.logits_and_labels(sizes)
    as_floats = logits.view(torch.float32)
    contest(
        largest(k),
        describe(*logits.shape, dtype=logits.dtype),
        lambda: d3s.topk_logprobs(logits, k).logprobs,
        peers={TOPK_AND_LOGSUMEXP: lambda: in_torch(logits, k)},
        yardsticks={"read": lambda: as_floats.sum(), "entropy": lambda: d3s.entropy(logits)},
        agree=close(0.2),  # torch rounds the logsumexp to bfloat16
    )


@pytest.mark.parametrize("k", [64, 256])
def test_of_the_head(contest: Contest, sizes: Sizes, k: int) -> None:
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    contest(
        largest_of_head(k),
        f"{describe(*hidden.shape)} x {len(weight):,} {str(weight.dtype).removeprefix('torch.')}",
        lambda: d3s.linear_topk_logprobs(hidden, weight, k).logprobs,
        yardsticks={HEAD_ALONE: lambda: d3s.linear_logprob_entropy(hidden, weight, labels)},
    )
