"""linear_logprob_entropy with sampling masks. Each row has a support, one span of ids; supports are as large as in
inference engines.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s

from . import inputs, peers
from .clock import Slow, Work
from .harness import Contest, close, describe
from .sizes import SHORT, Sizes

ENGINES_MEAN = 8  # mean number of ids in a row's support; other means show where computing all columns is faster
MEANS = [1, ENGINES_MEAN, 64, 512, 4_096]


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    weight_grad: Tensor  # the gradient of other micro-batches, to which a step may add its own


Loss = Callable[[Tensor, Tensor, inputs.Kept], tuple[Tensor, Tensor]]


@pytest.fixture
def contest(contest: Contest, sizes: Sizes) -> Contest:
    """There are fewer rounds than usual, since the times of the contenders are far apart."""
    contest.sizes = replace(sizes, seconds=sizes.seconds / 4)
    return contest


@pytest.fixture(scope="module")
def head(sizes: Sizes) -> Head:
    hidden, weight, _ = inputs.lm_head(sizes, "wide", torch.bfloat16)
    return Head(hidden, weight, torch.zeros_like(weight))


@pytest.fixture(scope="module")
def kept(sizes: Sizes) -> inputs.Kept:
    return inputs.draw_kept(sizes.vocabulary, sizes.head_tokens)


@pytest.fixture(scope="module")
def every_token(head: Head, kept: inputs.Kept) -> Work:
    """A step over the whole vocabulary. It does not depend on the spans. It takes 40 s on two cores without
    instructions for bfloat16.
    """
    return Slow(step(dense, head, kept, weight_grad_into=head.weight_grad, max_grad_rows=len(head.hidden)))


def ours(hidden: Tensor, weight: Tensor, kept: inputs.Kept, **options: object) -> tuple[Tensor, Tensor]:
    return dense(hidden, weight, kept, sampling_mask=kept.mask, max_dense_rows=0, **options)


def dense(hidden: Tensor, weight: Tensor, kept: inputs.Kept, **options: object) -> tuple[Tensor, Tensor]:
    return d3s.linear_logprob_entropy(hidden, weight, kept.labels, logits_dtype=torch.bfloat16, **options)


def step(loss: Loss, head: Head, kept: inputs.Kept, **options: object) -> Work:
    """A step: forward and backward. It returns the gradient of the hidden states. Without `weight_grad_into`, it also
    returns the gradient of the weight.
    """
    hidden, weight = (part.detach().requires_grad_() for part in head[:2])
    wanted = [hidden] if "weight_grad_into" in options else [hidden, weight]
    gradients = inputs.advantages(len(hidden)), inputs.entropies(len(hidden))
    return lambda: torch.autograd.grad(loss(hidden, weight, kept, **options), wanted, gradients)


def rivals(sizes: Sizes, bind: Callable[[Loss], Work]) -> dict[str, Work | None]:
    """The peers. On a CPU, the peer with all logits is as slow as `every_token`, so it is left out at full size."""
    affordable = peers.ON_GPU or sizes == SHORT
    return {
        "all logits, then gather": bind(peers.all_logits) if affordable else None,
        "kept columns in PyTorch, padded": Slow(bind(peers.kept_columns_padded)),
        "kept columns in PyTorch": bind(peers.kept_columns),
    }


def size_of(head: Head, kept: inputs.Kept) -> str:
    shape = describe(len(head.hidden), *head.weight.shape[::-1], dtype=head.weight.dtype)
    return f"{shape}, {len(kept.mask.token_ids):,} kept tokens"


def test_forward(contest: Contest, sizes: Sizes, head: Head, kept: inputs.Kept) -> None:
    def bind(loss: Loss) -> Work:
        return lambda: loss(head.hidden, head.weight, kept)

    contest(
        "linear_logprob_entropy forward, with a sampling mask",
        size_of(head, kept),
        bind(ours),
        peers=rivals(sizes, bind),
        yardsticks={"all tokens": Slow(bind(dense))},
        agree=close(0.2),  # PyTorch rounds logits, and the products that it sums, to bfloat16
    )


def test_forward_and_backward(contest: Contest, sizes: Sizes, head: Head, kept: inputs.Kept, every_token: Work) -> None:
    contest(
        "linear_logprob_entropy forward + backward, with a sampling mask",
        size_of(head, kept),
        step(ours, head, kept),
        peers=rivals(sizes, lambda loss: step(loss, head, kept)),
        # The step over the whole vocabulary does not allocate the dense gradient that `zeros_like` allocates. This
        # allocation would add a few percent to the time of the step.
        yardsticks={"all tokens": every_token, "zeros_like": lambda: torch.zeros_like(head.weight)},
        agree=close_where_kept(kept, 0.02),
    )


@pytest.mark.parametrize("mean", MEANS)
def test_added_to_a_gradient(contest: Contest, sizes: Sizes, head: Head, every_token: Work, mean: int) -> None:
    kept = inputs.draw_kept(sizes.vocabulary, sizes.head_tokens, mean=mean)
    which = "" if mean == ENGINES_MEAN else f", mean of {mean:,} kept tokens"
    contest(
        f"linear_logprob_entropy forward + backward, with a sampling mask, added to a gradient{which}",
        size_of(head, kept),
        step(ours, head, kept, weight_grad_into=head.weight_grad),
        yardsticks={"all tokens": every_token},
    )


def close_where_kept(kept: inputs.Kept, tolerance: float):
    """Two gradients agree if the norm of their difference is at most `tolerance` times the norm of ours. The weight's
    gradient is compared only in the rows of the supports' ids.
    """
    rows = kept.mask.token_ids.unique()

    def agree(name: str, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
        pairs = (ours[0], theirs[0]), (ours[1][rows], theirs[1][rows])
        for mine, other in pairs:
            error = (mine.float() - other.float()).norm() / mine.float().norm()
            assert error <= tolerance, f"{name}: a gradient is {error:.2g} off, relative in norm"

    return agree
