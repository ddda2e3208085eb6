"""Compares the Triton kernels, which serve GPUs without the CUDA library, with that library on a GPU where both run.

The Triton kernels are called directly, without the dispatcher and its checks, because the library cannot switch its
back-end between two turns.
"""

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels._dispatch import backends

from . import inputs
from .bench_logprob_entropy import half_a_copy
from .clock import Work
from .harness import Contest, close, close_gradient, describe
from .sizes import Sizes
from .targets import CUDA_LIBRARY, HALF_A_COPY, in_triton

FEW_ROWS = 32
RATIO = 0.1

if inputs.device.type != "cuda" or backends.serving("cuda") != {"cuda"} or backends.why_not("triton"):
    pytest.skip("needs a GPU with the CUDA library and Triton", allow_module_level=True)

from d3s_kernels._triton import KERNELS as TRITON  # noqa: E402


def test_forward(contest: Contest, sizes: Sizes) -> None:
    logits, labels = inputs.logits_and_labels(sizes)
    as_floats = logits.view(torch.float32)  # the same bytes, for a sum that does not convert them
    contest(
        in_triton("logprob_entropy forward"),
        describe(*logits.shape, dtype=logits.dtype),
        lambda: TRITON["logprob_entropy"](logits, labels)[:2],
        peers={CUDA_LIBRARY: lambda: d3s.logprob_entropy(logits, labels)},
        yardsticks={"read": lambda: as_floats.sum(), HALF_A_COPY: half_a_copy(logits)},
        agree=close(2e-5),
    )


def test_few_rows(contest: Contest, sizes: Sizes) -> None:
    """A batch of few rows. The kernel has one program for each slice of a row, and the GPU could run more programs at
    the same time.
    """
    logits, labels = (tensor.flatten(0, 1)[:FEW_ROWS].clone() for tensor in inputs.logits_and_labels(sizes))
    contest(
        in_triton("logprob_entropy forward, few rows"),
        describe(*logits.shape, dtype=logits.dtype),
        lambda logits: TRITON["logprob_entropy"](logits, labels)[:2],
        inputs=(logits,),
        peers={CUDA_LIBRARY: lambda logits: d3s.logprob_entropy(logits, labels)},
        agree=close(2e-5),
    )


def test_half_masked(contest: Contest, sizes: Sizes) -> None:
    logits, labels = inputs.logits_and_labels(sizes)
    mask = inputs.right_padded(*labels.shape)

    def forward(mask: Tensor | None) -> Work:
        return lambda: TRITON["logprob_entropy"](logits, labels, mask=mask)[:2]

    contest(
        in_triton("logprob_entropy forward, half of the rows masked (right-padded)"),
        describe(*logits.shape, dtype=logits.dtype),
        forward(mask),
        peers={CUDA_LIBRARY: lambda: d3s.logprob_entropy(logits, labels, mask=mask)},
        yardsticks={"all rows": forward(None)},
        agree=close(2e-5),
    )


def test_backward(contest: Contest, sizes: Sizes) -> None:
    logits, labels = inputs.logits_and_labels(sizes)
    gradients = inputs.advantages(*labels.shape), inputs.entropies(*labels.shape)
    statistics = torch.ops.d3s_kernels.logprob_entropy(logits, labels)[1:]
    arguments = *gradients, logits, labels, *statistics
    contest(
        in_triton("logprob_entropy backward, both gradients"),
        describe(*logits.shape, dtype=logits.dtype),
        lambda: TRITON["logprob_entropy_backward"](*arguments),
        peers={CUDA_LIBRARY: lambda: torch.ops.d3s_kernels.logprob_entropy_backward(*arguments)},
        yardsticks={"copy": lambda: torch.empty_like(logits).copy_(logits)},
        agree=close_gradient(1e-2),
    )


def test_select_tokens_from_logits(contest: Contest, sizes: Sizes) -> None:
    logits, labels = inputs.logits_and_labels(sizes)
    advantages = inputs.advantages(sizes.sequences)
    contest(
        in_triton("select_tokens_from_logits"),
        describe(*logits.shape, dtype=logits.dtype),
        lambda: TRITON["select_tokens_from_logits"](logits, advantages, RATIO)[1],
        peers={CUDA_LIBRARY: lambda: d3s.select_tokens_from_logits(logits, advantages, RATIO).entropy},
        yardsticks={"logprob_entropy": lambda: TRITON["logprob_entropy"](logits, labels)},
        agree=close(2e-5),
    )


def test_topk_mask(contest: Contest, sizes: Sizes) -> None:
    contest(
        in_triton("topk_mask of a batch, 10%"),
        describe(*sizes.batch),
        lambda scores: TRITON["topk_mask"](scores, RATIO),
        inputs=(inputs.advantages(*sizes.batch).abs() * inputs.entropies(*sizes.batch),),
        peers={CUDA_LIBRARY: lambda scores: d3s.topk_mask(scores, RATIO)},
        agree=close(0),
    )


def test_max_variance_select(contest: Contest, sizes: Sizes) -> None:
    contest(
        in_triton("max_variance_select, groups"),
        f"{describe(*sizes.groups)}, keep {sizes.keep:,}",
        lambda values: TRITON["max_variance_select"](values, sizes.keep),
        inputs=(inputs.advantages(*sizes.groups),),
        peers={CUDA_LIBRARY: lambda values: d3s.max_variance_select(values, sizes.keep)},
        agree=close(0),
    )
