"""logprob_entropy with sampling masks. Each row has a support, one span of ids; supports are as large as in inference
engines.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s

from . import inputs, peers
from .clock import Inputs, Work
from .harness import Contest, close, close_gradient, describe
from .sizes import Sizes


@pytest.fixture(scope="module")
def logits(sizes: Sizes) -> Tensor:
    return inputs.logits_and_labels(sizes)[0]


@pytest.fixture(scope="module")
def kept(sizes: Sizes) -> inputs.Kept:
    return inputs.kept_tokens(sizes)


@pytest.fixture(scope="module")
def size(logits: Tensor, kept: inputs.Kept) -> str:
    return f"{describe(*logits.shape, dtype=logits.dtype)}, {len(kept.mask.token_ids):,} kept tokens"


def ours(logits: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    return d3s.logprob_entropy(logits, kept.labels, sampling_mask=kept.mask, max_dense_rows=0)


def in_turn(kept: inputs.Kept, vocabulary: int, itemsize: int) -> Inputs:
    """Gives each call other supports. If all calls had the same supports, the few logits of the supports would stay in
    a GPU's cache.
    """
    step = 149  # each set has the ids of the previous set plus 149, so that a span has other ids in the next set
    new = 0.7  # the share of a set's logits that are in no other set; long spans share some logits

    @cache  # the sets are the same for all contenders
    def further(place: int) -> tuple[inputs.Kept]:
        return (kept.moved(place * step, vocabulary),)

    _ = kept.padded
    return Inputs((kept,), int(new * kept.sectors(vocabulary, itemsize) * inputs.SECTOR), further)


def test_forward(contest: Contest, logits, kept, size) -> None:
    contest(
        "logprob_entropy forward, with a sampling mask",
        size,
        lambda kept: ours(logits, kept),
        inputs=in_turn(kept, logits.shape[-1], logits.itemsize),
        peers={
            "-inf, then the dense op": lambda kept: peers.filled(logits, kept),
            "gather in PyTorch": lambda kept: peers.gathered(logits, kept),
        },
        yardsticks={"all tokens": lambda kept: d3s.logprob_entropy(logits, kept.labels)},
        agree=close(1e-3),
    )


def test_forward_and_backward(contest: Contest, logits, kept, size) -> None:
    """All calls have the same supports, since the dense gradient alone is larger than any cache."""
    gradients = inputs.advantages(*kept.labels.shape), inputs.entropies(*kept.labels.shape)

    def step(function: Callable[[Tensor, inputs.Kept], tuple[Tensor, Tensor]]) -> Work:
        leaf = logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(function(leaf, kept), leaf, gradients)[0]

    contest(
        "logprob_entropy forward + backward, with a sampling mask",
        size,
        step(ours),
        peers={
            "-inf, then the dense op": step(peers.filled),
            "gather in PyTorch": step(peers.gathered),
        },
        yardsticks={
            "all tokens": step(lambda leaf, kept: d3s.logprob_entropy(leaf, kept.labels)),
            "zeros_like": lambda: torch.zeros_like(logits),  # the gradient is dense
        },
        agree=close_gradient(1e-2),
    )
