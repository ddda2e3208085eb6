"""The Triton kernels in Triton's interpreter, with rows, slices and segments short enough for it.

pytest does not collect this file: it runs in a process of its own with TRITON_INTERPRET=1. Sizes that the kernels
choose for GPUs are made smaller, so that a few dozen elements have several slices, whole blocks and edges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import test_table
import torch
import unchecked
from cases.draw import draws
from cases.table import OPS
from helpers import (
    EVERYTHING,
    INF,
    NAN,
    assert_identical,
    assert_narrow_gradient,
    assert_same,
    assert_same_bits,
    random_logits,
    slow,
)
from test_logprob_entropy import test_any_logits, test_no_rows  # noqa: F401  run here too
from test_softmax_state import (  # noqa: F401  run here too
    test_a_label_of_another_piece,
    test_gradients_of_pieces,
    test_pieces_of_any_logits,
    test_pieces_without_logits_change_nothing,
)
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

import d3s_kernels as d3s
from d3s_kernels import _triton, reference
from d3s_kernels._dispatch import backends
from d3s_kernels._triton import launch, logprob_entropy, max_variance, topk_mask
from d3s_kernels._triton import logprob_entropy_backward as backward
from d3s_kernels.check.compare import compare_here

LOWEST = torch.finfo(torch.float32).min
BOTH = [torch.bfloat16, slow(torch.float32, shows="the same in float32")]
# Draws, by the largest length of a row or a segment. The kernels above have slices of 64 and programs of 32 or 64.
SIZES = {16: 20, 40: 10, 150: 4} if EVERYTHING else {16: 6, 40: 3, 150: 1}


def test_a_constant_of_a_kernel_equals_itself() -> None:
    """Triton compares the constants that a kernel has read with what they are at its next launch, and refuses a NaN.
    The interpreter does not: this was found on a GPU."""
    modules = [module for name, module in sys.modules.items() if name.startswith("d3s_kernels._triton")]
    constants = [value for module in modules for value in vars(module).values() if isinstance(value, tl.constexpr)]
    assert len(constants) > 5
    assert all(constant.value == constant.value for constant in constants)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """For each call, the interpreter replaces Triton's language by its own. It is the same for all functions, so it is
    done once; else it takes most of the time."""
    modules = {"tl": interpreter.tl, "core": interpreter.tl.core}
    language = interpreter._patch_lang(SimpleNamespace(__globals__=modules))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        yield
    language.restore()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ((8, 1), (32, 1))
    # In half precision twice 2 x 2 x 8 logits are in flight, or edges of 2 x 8.
    for module, values in (
        (logprob_entropy, {"SLICE": 64, "LANES": 2, "IN_FLIGHT": 2, "MERGERS": 4}),
        (launch, {"warp_size": lambda: 1}),
        (backward, {"PIECE": 64, "BLOCK": 32, "EDGE_BLOCK": 8}),
        (topk_mask, {"SIZES": sizes, "PART": 16, "LARGEST": 64}),
        (max_variance, {"SIZES": sizes, "LARGEST": 32}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def kernel(name: str, *arguments: Any, **options: Any) -> Any:
    """Calls a kernel without the checks before it, as on a GPU."""
    return _triton.KERNELS[name](*arguments, **options)


def fresh_states(rows: int) -> Tensor:
    return torch.tensor([LOWEST, 0.0, 0.0, NAN]).repeat(rows, 1)


def assert_served() -> None:
    assert backends._serving["cpu"]["logprob_entropy"] == backends._serving["cpu"]["topk_mask"] == "triton"


def with_gradients(logits: Tensor, labels: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """logprob, entropy, and the gradient of both together."""
    leaf = logits.detach().requires_grad_()
    found = d3s.logprob_entropy(leaf, labels, **options)
    (slope,) = torch.autograd.grad(found, leaf, list(weights))
    return found[0].detach(), found[1].detach(), slope


# ---- every op of the table -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", _triton.KERNELS)
def test_every_op_means_what_the_table_says(op: str) -> None:
    function, row = getattr(torch.ops.d3s_kernels, op).default, OPS[op]
    assert_served()
    for most, count in SIZES.items():
        for draw in draws(count, most=most):
            arguments = row.draw(draw)
            for difference in compare_here(row, function, arguments, torch.device("cpu"), "triton"):
                assert difference.agrees, difference


@pytest.mark.parametrize("op", [op for op in _triton.KERNELS if op != "select_tokens_from_logits"])  # made of others
def test_strides_and_what_is_masked_change_no_bit(op: str) -> None:
    test_table.test_strides_and_alignment_change_no_bit(op)
    if op in test_table.MASKED:
        test_table.test_what_is_masked_is_not_read(op)


# ---- rows of logits --------------------------------------------------------------------------------------------------


def test_rows_that_are_too_long() -> None:
    logits, row = torch.zeros(1).expand(1, 2**31 - 1), torch.zeros(1)
    with pytest.raises(ValueError, match="logits: got rows of 2147483647 tokens"):
        kernel("logprob_entropy", logits, None)
    with pytest.raises(ValueError, match="logits: got rows of 2147483647 tokens"):
        kernel("logprob_entropy_backward_", row, row, logits, None, row, row, row, 0)


def test_rows_2_31_elements_apart() -> None:
    """A stride that fits an int32 in units of 16 bytes, but not in elements."""
    logits, labels = random_logits(4, 40, dtype=torch.bfloat16), torch.tensor([3, 39, -100, 0])
    weights = torch.randn(2, 4)
    expected = with_gradients(logits, labels, weights)
    room = torch.empty(2**31 + 200, dtype=torch.bfloat16)  # memory that is not written takes no room
    for apart, order in (
        (room.as_strided((2, 2, 40), (2**31, 48, 1)), [0, 1, 2, 3]),
        (room.as_strided((2, 40), (2**31, 1)), [0, 3]),
    ):
        rows = apart.shape[:-1]
        apart.copy_(logits[order].view(apart.shape))
        found = with_gradients(apart, labels[order].view(rows), weights[:, order].view(2, *rows))
        flat = (one.flatten(0, len(rows) - 1) for one in found)
        assert_same(flat, (other[order] for other in expected))


def test_a_label_that_is_nearly_sure() -> None:
    """Checks that the gradient keeps the accuracy of 1 - p as p approaches 1."""
    sure = torch.arange(-2.0, 10.0, 1 if EVERYTHING else 3)
    n = len(sure)
    logits = torch.zeros(n, 70)
    logits[:, 66] = sure
    slope = with_gradients(logits, torch.full((n,), 66), torch.tensor([1.0, 0.0]).view(2, 1).expand(2, n))[2]
    torch.testing.assert_close(slope[:, 66].double(), 69 / (69 + sure.double().exp()), rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("check", unchecked.OF_TRITON)
def test_values_that_nobody_checked(check: Callable[..., None]) -> None:
    check(kernel)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("steps", [(64, 64, 22), *(slow(steps, shows="other tiles") for steps in ((128, 22), (150,)))])
def test_tiles_are_the_whole(dtype: torch.dtype, steps: tuple[int, ...]) -> None:
    """Bit-identical where tiles end with slices: states, gradients in place, and labels of any tile."""
    logits, labels = random_logits(7, 150, dtype=dtype), torch.tensor([0, 63, 64, 127, 128, 149, -100])
    weights, temperature = torch.randn(2, 7), 0.5 + torch.rand(7)
    whole = kernel("logprob_entropy", logits, labels, 1.0, temperature)
    state, starts = fresh_states(7), [0, *accumulate(steps)][:-1]
    for first, tile in zip(starts, logits.split(steps, 1), strict=True):
        kernel("softmax_state_", state, tile, labels.int(), first, 1.0, temperature)
    outputs = kernel("softmax_state_finish", state, 1.0, temperature)
    assert outputs[0][-1].isnan()  # no label was seen: the LM head puts 0
    outputs[0][-1] = 0
    assert_same(outputs, whole)
    slope = kernel("logprob_entropy_backward", *weights, logits, labels, *whole[1:], 1.0, temperature)
    for first, tile in zip(starts, logits.split(steps, 1), strict=True):
        kernel("logprob_entropy_backward_", *weights, tile, labels, *whole[1:], first, 1.0, temperature)
    assert_same_bits(logits, slope)


@pytest.mark.parametrize("columns", [1, 8, 31, 32, 33, 150])
def test_gradient_in_half_precision(columns: int) -> None:
    """Around the ends of edges and blocks, and over several pieces. (The interpreter truncates to bfloat16.)"""
    functions = _triton.KERNELS["logprob_entropy"], _triton.KERNELS["logprob_entropy_backward_"]
    assert_narrow_gradient(*functions, columns, torch.float16)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_threshold_is_the_lowest_score_that_is_kept() -> None:
    scores = torch.tensor([[-1.0, -2, -3], [1e-40, 2e-40, 3e-40], [-INF, INF, NAN], [NAN, NAN, NAN], [-0.0, 0, -1]])
    half, all_of_them = ([2, 2, 1, 0, 2], [-2, 2e-40, INF, INF, 0]), ([3, 3, 2, 0, 3], [-3, 1e-40, -INF, INF, -1])
    for ratio, (kept, lowest) in ((0.5, half), (1, all_of_them)):
        _, counts, thresholds = kernel("select_tokens", scores, torch.tensor(-1.0), ratio, pooled=False)
        assert counts.tolist() == kept
        assert_identical(thresholds, torch.tensor(lowest))


@pytest.mark.parametrize("length", [33, 64, 65])  # of which a program holds 32, and reads at most 64
def test_scores_that_a_program_takes_in_parts(length: int) -> None:
    for draw in draws(2):
        scores, mask, k = draw.values((2, length)), draw.mask((2, length)), draw.integer(1, length)
        for quota in ({"ratio": 0.3}, {"k": k}, {"ratio": torch.tensor(0.07)}, {"k": torch.tensor(k)}):
            found = d3s.topk_mask(scores, **quota, mask=mask)
            assert_identical(found, reference.topk_mask(scores, **quota, mask=mask))
        for each in (torch.tensor(-0.7), torch.randn(2), torch.randn(2, length)):
            given = {"mask": mask, "scope": "sequence", "drop_zeros": draw.flag()}
            ours, theirs = (of.select_tokens(scores, each, 0.3, **given) for of in (d3s, reference))
            for one, other in zip(ours[:4], theirs[:4], strict=True):
                assert_identical(one, other)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def test_splits_that_are_equal_up_to_rounding() -> None:
    """The split with the fewest from the top is taken, also where squares leave no digits for differences."""
    rewards = torch.tensor([0.0, 1.0]).repeat(12)
    for values in (rewards, rewards * 0.1, rewards / 4 + 3333333.25):
        for k in range(2, 13) if EVERYTHING else (2, 7, 12):
            assert values[d3s.max_variance_select(values, k)].gt(values.min()).sum() == k // 2
