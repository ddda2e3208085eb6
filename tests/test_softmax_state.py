"""A vocabulary in shards: a state for each shard, merged at the end, and a gradient for each shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from cases.draw import SPECIAL, Draw, draws
from cases.logprobs import any_logits
from helpers import (
    INF,
    NAN,
    assert_entropy,
    assert_gradient,
    assert_logprob,
    assert_same,
    assert_same_bits,
    random_labels,
    random_logits,
)
from torch import Tensor

from d3s_kernels import reference

OPS = torch.ops.d3s_kernels


class LogitsCase(NamedTuple):
    logits: Tensor
    labels: Tensor
    options: dict[str, Any]  # temperature and mask


def no_logits(rows: int) -> Tensor:
    return torch.tensor([torch.finfo().min, 0.0, 0.0, NAN]).repeat(rows, 1)


def of_rows(temperature: float | Tensor, shape: torch.Size) -> tuple[float, Tensor | None]:
    """The temperature in the form that the ops take: a number, a 0-d tensor, or one for each row."""
    if not isinstance(temperature, Tensor):
        return temperature, None
    return 1.0, (temperature if temperature.dim() == 0 else temperature.expand(shape)).float().contiguous()


def states_of(case: LogitsCase, edges: list[int]) -> Tensor:
    """A state for each shard: ``[shards, rows, 4]``."""
    states = []
    for first, last in pairwise(edges):
        states.append(no_logits(case.labels.numel()))
        options = *of_rows(case.options["temperature"], case.labels.shape), case.options["mask"]
        OPS.softmax_state_(states[-1], case.logits[..., first:last], case.labels, first, *options)
    return torch.stack(states)


def finished(case: LogitsCase, states: Tensor) -> tuple[Tensor, ...]:
    """logprob, entropy, row_max and log_sum of each row. Masked rows are 0; logprob is 0 where there is no label."""
    number, tensor = of_rows(case.options["temperature"], case.labels.shape)
    found = OPS.softmax_state_finish(states, number, tensor if tensor is None or tensor.dim() == 0 else tensor.view(-1))
    found[0].masked_fill_(case.labels.reshape(-1) == -100, 0)
    mask = case.options["mask"]
    if mask is not None:
        found = [values.masked_fill(~mask.reshape(-1), 0) for values in found]
    return tuple(values.view(case.labels.shape) for values in found)


def gradient_of_pieces(case: LogitsCase, edges: list[int], weights: Tensor, statistics: tuple[Tensor, ...]) -> Tensor:
    options = *of_rows(case.options["temperature"], case.labels.shape), case.options["mask"]
    shards = [
        OPS.logprob_entropy_backward(*weights, case.logits[..., first:last], case.labels, *statistics, *options, first)
        for first, last in pairwise(edges)
    ]
    return torch.cat(shards, -1)


def drawn(draw: Draw, *special: float) -> tuple[LogitsCase, list[int]]:
    """Logits, and the edges of up to five shards, some of them empty."""
    given = any_logits(draw, *special)
    options = {"temperature": given["temperature"], "mask": given["mask"]}
    case = LogitsCase(given["logits"], given["labels"], options)
    return case, [0, *accumulate(draw.parts(case.logits.shape[-1], draw.integer(1, 5)))]


def test_pieces_of_any_logits() -> None:
    for draw in draws(most=80):
        case, edges = drawn(draw, *SPECIAL, 3e38, -3e38, 1e20, 88.0)
        logprob, entropy, *_ = finished(case, states_of(case, edges))
        expected = reference.logprob_entropy(case.logits, case.labels, **case.options)
        assert_logprob(logprob, expected[0])
        assert_entropy(entropy, expected[1])


def test_gradients_of_pieces() -> None:
    for draw in draws(most=80):
        case, edges = drawn(draw, -INF)
        case.logits.nan_to_num_(0.0, posinf=0.0, neginf=-INF)
        case.logits[..., 0] = 0  # a row of nothing but -inf has no gradient
        statistics = finished(case, states_of(case, edges))[1:]
        weights = torch.randn(2, *case.labels.shape)
        slope = gradient_of_pieces(case, edges, weights, statistics)
        exact = case.logits.double().requires_grad_()
        results = reference.logprob_entropy(exact, case.labels, **case.options)
        (expected,) = torch.autograd.grad(results, exact, list(weights.double()))
        assert_gradient(slope, expected, floor=1e-6 * (weights / case.options["temperature"]).norm().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_piece_is_a_state_without_pieces(dtype: torch.dtype) -> None:
    """One piece gives the bits of a state without pieces, and the bits of the whole op."""
    logits, labels = random_logits(2, 3, 40_000, dtype=dtype), random_labels(2, 3, vocabulary=40_000)
    case = LogitsCase(logits, labels, {"temperature": 0.5 + torch.rand(2, 3), "mask": torch.rand(2, 3) < 0.7})
    states, found = states_of(case, [0, 40_000]), finished(case, states_of(case, [0, 40_000]))
    assert_same(found, finished(case, states[0]))
    options = *of_rows(case.options["temperature"], labels.shape), case.options["mask"]
    assert_same(found, OPS.logprob_entropy(logits, labels, *options))
    weights = torch.randn(2, 2, 3)
    assert_same_bits(
        gradient_of_pieces(case, [0, 40_000], weights, found[1:]),
        OPS.logprob_entropy_backward(*weights, logits, labels, *found[1:], *options),
    )


def test_pieces_are_merged_from_left_to_right() -> None:
    """The result equals that of three tiles that update one state, in the order that all ranks use."""
    logits, labels = random_logits(9, 3 * 8192), random_labels(9, vocabulary=3 * 8192)
    case = LogitsCase(logits, labels, {"temperature": 0.7, "mask": None})
    edges = [0, 8192, 2 * 8192, 3 * 8192]  # no kernel cuts a row into shorter parts
    state = no_logits(9)
    for first, last in pairwise(edges):
        OPS.softmax_state_(state, logits[:, first:last], labels, first, 0.7)
    assert_same(finished(case, states_of(case, edges)), finished(case, state))


def test_pieces_without_logits_change_nothing() -> None:
    """Pieces with no columns, or with only -inf, before and after the others."""
    logits, labels = random_logits(6, 50), random_labels(6, vocabulary=50)
    expected = ()
    for before, after in ((0, 0), (7, 0), (0, 7), (7, 30)):
        padded = torch.nn.functional.pad(logits, (before, after), value=-INF)
        case = LogitsCase(padded, labels + before * (labels != -100), {"temperature": 1.0, "mask": None})
        found = finished(case, states_of(case, [0, before, before + 50, before + 50 + after]))
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rows_of_nothing_but_minus_infinity_are_nan() -> None:
    case = LogitsCase(torch.full((3, 9), -INF), torch.zeros(3).long(), {"temperature": 1.0, "mask": None})
    assert all(torch.stack(finished(case, states_of(case, [0, 4, 9]))[:2]).isnan().flatten())


def test_a_label_of_another_piece() -> None:
    """A label outside the piece adds no term to state and gradient. A label below 0 is in no piece."""
    logits, labels, ones = random_logits(4, 60), torch.tensor([5, 25, 59, -100]), torch.ones(4)
    _, *statistics = OPS.logprob_entropy(logits, labels)
    whole = OPS.logprob_entropy_backward(ones, ones, logits, labels, *statistics)
    for first, last in ((0, 20), (20, 40), (40, 60)):
        shard = OPS.logprob_entropy_backward(ones, ones, logits[:, first:last], labels, *statistics, first_token=first)
        assert_gradient(shard, whole[:, first:last].double())
    state = no_logits(4)
    OPS.softmax_state_(state, logits[:, 20:40], labels, 20)
    assert state[:, 3].isnan().tolist() == [True, False, True, True]
    assert state[1, 3] == logits[1, 25]


def test_what_is_refused() -> None:
    logits, labels = random_logits(3, 20), torch.arange(3)

    def refused(said: str, op: Callable[..., Any], *given: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=f"^{said}"):
            op(*given, **options)

    takes = r"takes contiguous float32 \[rows, 4\]"
    for shape in ([0, 3, 4], [2, 3, 5], [4], [2, 2, 3, 4]):
        said = rf"state: got shape {re.escape(str(shape))} of torch.float32; {takes} or \[shards, rows, 4\]$"
        refused(said, OPS.softmax_state_finish, torch.zeros(shape))
    refused(r"temperature: got shape \[2\]", OPS.softmax_state_finish, torch.zeros(2, 3, 4), 1.0, torch.ones(2))
    update, state = OPS.softmax_state_, no_logits(3)
    refused(
        rf"state: got shape \[2, 3, 4\] of torch.float32; {takes}$", update, torch.zeros(2, 3, 4), logits, labels, 0
    )
    refused(r"logits: got shape \[3, 20\]; takes \[..., tile\] with the row", update, no_logits(4), logits, labels, 0)
    refused(r"mask: got shape \[2\]", update, state, logits, labels, 0, mask=torch.ones(2).bool())
    backward, statistics = OPS.logprob_entropy_backward, torch.zeros(3, 3)
    refused("first_token: got -1; takes at least 0", backward, None, None, logits, labels, *statistics, first_token=-1)
