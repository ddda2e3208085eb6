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
    random_labels,
    random_logits,
    rounds,
    slow,
    unwritten,
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
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_OR_ALL = [DTYPES[0], *(slow(dtype, shows=f"the same in {dtype}") for dtype in DTYPES[1:])]
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


# ---- rows of logits --------------------------------------------------------------------------------------------------


def test_rows_that_are_too_long() -> None:
    logits, row = torch.zeros(1).expand(1, 2**31 - 1), torch.zeros(1)
    with pytest.raises(ValueError, match="logits: got rows of 2147483647 tokens"):
        kernel("logprob_entropy", logits, None)
    with pytest.raises(ValueError, match="logits: got rows of 2147483647 tokens"):
        kernel("logprob_entropy_backward_", row, row, logits, None, row, row, row, 0)


@pytest.mark.parametrize("dtype", ONE_OR_ALL)
def test_a_row_has_the_same_bits_wherever_it_lies(dtype: torch.dtype) -> None:
    """Alone, among others, misaligned, and with irregular strides between rows."""
    logits, labels = torch.randn(4, 100).div(2).to(dtype), torch.tensor([0, 99, 64, -100])
    weights = torch.randn(2, 4)
    together = with_gradients(logits, labels, weights)
    alone = [with_gradients(logits[i : i + 1], labels[i : i + 1], weights[:, i : i + 1]) for i in range(4)]
    assert_same(map(torch.cat, zip(*alone, strict=True)), together)
    # The first element, the stride of rows, and the gap between pairs of rows: misaligned, aligned, and misaligned by
    # the gap alone.
    for lead, pitch, gap, turned in ((1, 100, 0, False), (3, 107, 5, True), (8, 104, 16, True), (0, 104, 3, False)):
        room = torch.full((lead + 2 * (2 * pitch + gap),), NAN, dtype=dtype)
        apart = room.as_strided((2, 2, 100), (2 * pitch + gap, pitch, 1), lead)
        apart.copy_(logits.view(2, 2, 100))
        of_rows = apart, labels.view(2, 2), weights.view(2, 2, 2)
        if turned:
            of_rows = apart.transpose(0, 1), of_rows[1].t(), of_rows[2].transpose(1, 2)
        found = [one.transpose(0, 1) if turned else one for one in with_gradients(*of_rows)]
        assert_same((one.flatten(0, 1) for one in found), together)


@pytest.mark.parametrize("dtype", ONE_OR_ALL)
def test_the_sums_of_a_row_have_one_order(dtype: torch.dtype) -> None:
    """Aligned and misaligned. The sums themselves show more differences than their logarithms."""
    count = rounds(12)
    logits, states = torch.randn(count, 104).to(dtype), []
    for pitch in (104, 105):
        rows = torch.empty(count, pitch, dtype=dtype)[:, :104].copy_(logits)
        states.append(fresh_states(count))
        kernel("softmax_state_", states[-1], rows, None, 0)
    assert_same_bits(*states)


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


def test_more_than_two_dimensions_that_step_unevenly() -> None:
    n = 3 if EVERYTHING else 2
    logits = random_logits(n, n + 1, 2 * n - 1, 40)[:, 1:, ::2].transpose(0, 1)
    labels, weights = random_labels(n, n, n, vocabulary=40), torch.randn(2, n, n, n)
    expected = with_gradients(logits.contiguous(), labels, weights)
    assert_same(with_gradients(logits, labels, weights), expected)
    state = kernel("logprob_entropy", logits, labels)
    kernel("logprob_entropy_backward_", *weights, logits, labels, *state[1:], 0)
    assert_same_bits(logits, expected[2])


@pytest.mark.parametrize("length", [5, slow(70, shows="such values in several slices")])
def test_values_that_are_no_numbers(length: int) -> None:
    """In any lane and slice, also at both ends of a row: -inf does not count, and +inf, NaN or only -inf give NaN."""
    places = sorted({0, 1, length // 2, length - 1})
    rows = [torch.randn(length)]
    for value in (-INF, INF, NAN):
        rows += [torch.randn(length).index_fill(0, torch.tensor([place]), value) for place in places]
    rows += [torch.full((length,), value) for value in (-INF, INF, NAN, LOWEST, -LOWEST, -1e30)]
    rows += [torch.randn(length).index_fill(0, torch.arange(n, length), -INF) for n in (1, length // 2)]
    rows += [torch.full((length,), -INF).index_fill(0, torch.tensor([place]), -1e38) for place in places]
    rows += [torch.randn(length).index_fill(0, torch.tensor([place]), 3e38) for place in places]
    logits = torch.stack(rows)
    labels, weights = torch.tensor([0, length - 1]).repeat(len(rows))[: len(rows)], torch.ones(2, len(rows))
    found = with_gradients(logits, labels, weights)
    with backends.forced("torch"):
        expected = with_gradients(logits, labels, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6, equal_nan=True)
    assert (found[1] >= 0).tolist() == (~found[1].isnan()).tolist()


def test_a_label_that_is_nearly_sure() -> None:
    """Checks that the gradient keeps the accuracy of 1 - p as p approaches 1."""
    sure = torch.arange(-2.0, 10.0, 1 if EVERYTHING else 3)
    n = len(sure)
    logits = torch.zeros(n, 70)
    logits[:, 66] = sure
    slope = with_gradients(logits, torch.full((n,), 66), torch.tensor([1.0, 0.0]).view(2, 1).expand(2, n))[2]
    torch.testing.assert_close(slope[:, 66].double(), 69 / (69 + sure.double().exp()), rtol=1e-5, atol=3e-7)


def test_what_is_masked_or_without_a_gradient_is_not_read() -> None:
    logits, labels, mask = random_logits(6, 100), torch.tensor([1, -100, 3, 99, 5, -100]), torch.ones(6).bool()
    statistics = kernel("logprob_entropy", logits, labels)[1:]
    g_logprob, g_entropy = torch.tensor([0.0, 2, 3, 0, NAN, 2]), torch.tensor([0.0, 0, 0, 5, 0, 0])
    mask[2] = False
    unread = logits.clone()
    unread[[0, 1, 2, 5]] = NAN  # the labels of the second and the last row are none
    for options in ({"mask": mask}, {"mask": mask, "temperature_tensor": torch.ones(6)}):
        with unwritten(unread, labels, g_logprob, g_entropy, mask):
            slope = kernel("logprob_entropy_backward", g_logprob, g_entropy, unread, labels, *statistics, **options)
        assert slope.isnan().all(1).tolist() == slope.isnan().any(1).tolist() == [False] * 4 + [True, False]
        assert slope.any(1).tolist() == [False, False, False, True, True, False]
    outputs = kernel("logprob_entropy", unread, labels, mask=~unread.isnan().any(1))
    assert not torch.stack(outputs)[:, [0, 1, 2, 5]].any()
    assert not torch.stack(outputs).isnan().any()


@pytest.mark.parametrize("check", unchecked.OF_TRITON)
def test_values_that_nobody_checked(check: Callable[..., None]) -> None:
    check(kernel)


def test_nothing_to_do() -> None:
    for shape in ((0, 20), (2, 0, 20)):
        logits, labels = torch.empty(shape), torch.empty(shape[:-1], dtype=torch.int64)
        logprob, entropy, slope = with_gradients(logits, labels, torch.ones(2, *shape[:-1]))
        assert logprob.shape == entropy.shape == shape[:-1]
        assert slope.shape == shape
    logits, labels = torch.empty(2, 0), torch.tensor([-100, 0])
    logprob, entropy, *others = kernel("logprob_entropy", logits, labels)
    assert entropy.isnan().all()
    assert logprob.isnan().tolist() == [False, True]
    assert kernel("logprob_entropy_backward", *torch.ones(2, 2), logits, labels, entropy, *others).shape == (2, 0)


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


def test_a_tile_without_labels() -> None:
    logits = random_logits(5, 90)
    state = torch.tensor([LOWEST, 0.0, 0.0, 7.0]).repeat(5, 1)
    kernel("softmax_state_", state, logits, None, 0, 0.5)
    logprob, entropy, row_max, log_sum = kernel("softmax_state_finish", state, 0.5)
    expected = kernel("logprob_entropy", logits, None, 0.5)
    assert_same((entropy, row_max, log_sum), expected[1:])
    torch.testing.assert_close(logprob, (7 - row_max) / 0.5 - log_sum)
    assert not expected[0].any()


def test_a_label_that_no_tile_has() -> None:
    """In the LM head a label that is no token gives NaN, not the value beside the tile."""
    state, logits = fresh_states(4), random_logits(4, 50)
    kernel("softmax_state_", state, logits, torch.tensor([9, 60, -(2**63), -1]), 10)
    assert kernel("softmax_state_finish", state)[0].isnan().all()
    statistics = torch.randn(3, 4)
    slope = logits.clone()
    kernel("logprob_entropy_backward_", torch.ones(4), None, slope, torch.tensor([9, 60, 5, -1]), *statistics, 10)
    assert slope.isnan().all(1).tolist() == [False, False, False, True]


@pytest.mark.parametrize("dtype", BOTH)
def test_pieces_are_the_tiles_merged_in_their_order(dtype: torch.dtype) -> None:
    """Each piece has its own state, bit-identical to one state if the piece is one slice; gradients too."""
    logits = random_logits(2, 5, 150, dtype=dtype)[:, 1:]
    labels = torch.tensor([0, 63, 64, 127, 128, 149, -100, 5]).view(2, 4)
    mask = torch.tensor([True, True, False, True] * 2).view(2, 4)
    weights, temperature = torch.randn(2, 2, 4), 0.5 + torch.rand(2, 4)
    options = 1.0, temperature, mask
    whole = kernel("logprob_entropy", logits, labels, *options)
    slope = kernel("logprob_entropy_backward", *weights, logits, labels, *whole[1:], *options)
    unread = logits.masked_fill(~mask.unsqueeze(-1), NAN)
    nothing = fresh_states(8)
    states = nothing.repeat(4, 1, 1)
    for state, first, last in zip(states, (0, 64, 64, 128), (64, 64, 128, 150), strict=True):  # the second is empty
        piece = unread[..., first:last]
        kernel("softmax_state_", state, piece, labels, first, *options)
        assert_same_bits(state[2::4], nothing[2::4])
        part = kernel("logprob_entropy_backward", *weights, piece, labels, *whole[1:], *options, first)
        assert_same_bits(part, slope[..., first:last].contiguous())
    outputs = kernel("softmax_state_finish", states, 1.0, temperature.view(-1))
    outputs[0][labels.view(-1) == -100] = 0
    assert_same((one[mask.view(-1)] for one in outputs), (other[mask] for other in whole))
    assert outputs[1][~mask.view(-1)].isnan().all()  # rows that were not read have no known values
    assert_same(*(kernel("softmax_state_finish", given, 0.5) for given in (states[:1], states[0])))


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


def test_a_ratio_that_was_rounded_up() -> None:
    """0.28 of 25 is 7, in float32 and in float64."""
    for ratio in (0.28, torch.tensor(0.28), torch.tensor(0.28, dtype=torch.float64)):
        assert d3s.topk_mask(torch.randn(25), ratio).sum() == 7


# ---- rollouts --------------------------------------------------------------------------------------------------------


def test_splits_that_are_equal_up_to_rounding() -> None:
    """The split with the fewest from the top is taken, also where squares leave no digits for differences."""
    rewards = torch.tensor([0.0, 1.0]).repeat(12)
    for values in (rewards, rewards * 0.1, rewards / 4 + 3333333.25):
        for k in range(2, 13) if EVERYTHING else (2, 7, 12):
            assert values[d3s.max_variance_select(values, k)].gt(values.min()).sum() == k // 2


def test_infinite_rewards_are_not_chosen() -> None:
    values = torch.tensor([[1.0, INF, 3.0, -INF, 2.0, NAN], [INF, INF, -1.0, 0.0, 5.0, 5.0]])
    for keep in (2, 3):
        kept = d3s.max_variance_select(values, keep)
        assert_identical(kept, reference.max_variance_select(values, keep))
        assert values[kept].isfinite().all()
