"""Times the forwards from logits, and the LM head in half precision, as on a processor whose best instructions are
AVX2.

`python -m benchmarks` runs this file in a process of its own, in which the library, torch's own loops and torch.compile
use no better instructions than AVX2. So the yardsticks, too, show what such a processor can do.
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

import d3s_kernels as d3s

from . import inputs, peers
from .bench_head import close_in_norm
from .bench_logprob_entropy import compiled, labels, logits, size, test_entropy, test_forward  # noqa: F401
from .harness import Contest, describe
from .sizes import Sizes
from .targets import AVX2_ALONE, AVX2_ENVIRONMENT, HEAD_STEP

if not os.environ.items() >= AVX2_ENVIRONMENT.items():
    pytest.skip("needs an environment with AVX2 alone", allow_module_level=True)


@pytest.fixture
def contest(contest: Contest) -> Contest:
    contest.name_ends = AVX2_ALONE
    return contest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_head_in_half_precision(contest: Contest, sizes: Sizes, dtype: torch.dtype) -> None:
    """The inputs are small, since torch takes minutes for larger products in half precision. Our products are in
    float32.
    """
    rows, tokens = 64, 16_384
    hidden, weight, next_tokens = inputs.lm_head(sizes, "narrow", torch.float32)
    hidden, weight, targets = hidden[:rows], weight[:tokens].contiguous(), next_tokens[:rows] % tokens
    gradient = inputs.advantages(rows)

    def step(function: Callable, dtype: torch.dtype) -> Callable[[], tuple[torch.Tensor, ...]]:
        leaves = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return d3s.linear_logprob_entropy(hidden, weight, targets)[0]

    def trl(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return peers.trl_grpo(linear(hidden, weight), targets)[0]

    contest(
        f"{HEAD_STEP}, {str(dtype).removeprefix('torch.')}",
        describe(rows, *weight.shape[::-1], dtype=dtype),
        step(ours, dtype),
        peers={"TRL": step(trl, dtype)},
        yardsticks={"float32": step(ours, torch.float32)},
        agree=close_in_norm(0.05),
    )
