"""Promises of token_logprobs and linear_token_logprobs that the table does not check."""

from __future__ import annotations

import math

import pytest
import torch
from cases.coverage import replaced
from helpers import assert_identical
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import linear_token_logprobs, reference, token_logprobs

R, V, H = 6, 90, 16


def rows(vocabulary: int = V, ids: int = 5) -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(R, vocabulary), torch.randint(vocabulary, (R, ids))


def test_the_tail_is_accurate_where_the_given_ids_have_nearly_all_of_the_probability() -> None:
    logits, ids = torch.zeros(2, 5000), torch.tensor([[7], [0]])
    logits[0, 7], logits[1, 0] = 60.0, 300.0
    logits.requires_grad_()
    tail = token_logprobs(logits, ids).tail_logprob
    torch.testing.assert_close(tail, math.log(4999) - torch.tensor([60.0, 300.0]), rtol=1e-6, atol=1e-5)
    tail.sum().backward()  # the probabilities within the tail, although each of them is 0 in float32 in the second row
    expected = torch.full_like(logits, 1 / 4999)
    expected[0, 7] = expected[1, 0] = -1
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_row_without_a_tail() -> None:
    """All ids are given, or the others have logits of -inf: no probability is left, and the tail is a constant."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, -math.inf]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([[2, 0, 1], [1, 0, -1]]))
    assert found.tail_logprob.tolist() == [-math.inf, -math.inf]
    found.tail_logprob.backward(torch.ones(2))
    assert not logits.grad.any()


def test_each_copy_of_an_id_has_its_result_and_its_gradient() -> None:
    logits, _ = rows()
    once, twice = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    token_logprobs(once, torch.full((R, 1), 3)).logprobs.backward(torch.full((R, 1), 3.0))
    found = token_logprobs(twice, torch.full((R, 2), 3))
    assert_identical(found.logprobs[:, 0], found.logprobs[:, 1])
    assert_identical(found.tail_logprob, token_logprobs(logits, torch.full((R, 1), 3)).tail_logprob)
    found.logprobs.backward(torch.tensor([1.0, 2.0]).expand(R, 2))
    torch.testing.assert_close(once.grad, twice.grad, rtol=1e-6, atol=1e-6)


def test_no_ids_leave_the_results_of_logprob_entropy() -> None:
    logits, _ = rows()
    labels = torch.randint(V, (R,))
    found = token_logprobs(logits, torch.empty(R, 0, dtype=torch.int64), labels)
    logprob, entropy = d3s.logprob_entropy(logits, labels)
    assert_identical(found.logprob, logprob)
    assert_identical(found.entropy, entropy)
    assert found.logprobs.shape == (R, 0)
    assert found.tail_logprob.abs().max() < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(bad: float) -> None:
    logits, ids = rows()
    for place in (ids[1, 0], (ids[1].max() + 1) % V):  # at a given id, and most likely in the tail
        spoilt = logits.clone()
        spoilt[1, place] = bad
        for clean, result in zip(token_logprobs(logits, ids), token_logprobs(spoilt, ids), strict=True):
            if result is not None and clean.any():
                assert result[1].isnan().all()
                assert_identical(result[2:], clean[2:])


def test_a_row_depends_on_no_other_row() -> None:
    logits, ids, labels = torch.randn(R, 20_000), torch.randint(-1, 20_000, (R, 7)), torch.randint(20_000, (R,))
    for one, other in zip(
        token_logprobs(logits[2], ids[2], labels[2]), token_logprobs(logits, ids, labels), strict=True
    ):
        assert_identical(one, other[2])


@pytest.mark.skipif(replaced(), reason="these kernels have longer slices than the CPU's, at which tiles are cut here")
def test_a_row_of_the_head_depends_on_no_tile() -> None:
    hidden, weight = torch.randn(R, H), torch.randn(20_000, H)
    ids, labels = torch.randint(-1, 20_000, (R, 7)), torch.randint(20_000, (R,))
    whole = linear_token_logprobs(hidden, weight, ids, labels)
    tiles = linear_token_logprobs(hidden, weight, ids, labels, workspace_bytes=4 * 8192 * R)
    for one, other in zip(whole, tiles, strict=True):
        assert_identical(one, other)


def test_the_weight_gradient_is_added_to_a_tensor() -> None:
    hidden, weight = torch.randn(R, H), torch.randn(V, H, requires_grad=True)
    ids, into = torch.randint(V, (R, 3)), torch.ones(V, H)
    linear_token_logprobs(hidden, weight, ids).logprobs.sum().backward()
    expected, weight.grad = weight.grad, None
    found = linear_token_logprobs(hidden, weight, ids, weight_grad_into=into)
    found.logprobs.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(into - 1, expected, rtol=1e-5, atol=1e-5)


def test_more_rows_with_a_gradient_than_the_bound_make_every_gradient_nan() -> None:
    hidden, weight = torch.randn(R, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    ids = torch.randint(V, (R, 3))
    for bound, exceeded in ((2, False), (1, True)):
        found = linear_token_logprobs(hidden, weight, ids, max_grad_rows=bound)
        hidden.grad = weight.grad = None
        found.logprobs[1:3].sum().backward()
        assert weight.grad.isnan().all() == hidden.grad.isnan().all() == exceeded


def test_it_compiles_without_a_break() -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        found = token_logprobs(logits, ids)
        return (found.logprobs.exp() * found.logprobs).sum() + found.tail_logprob.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, ids = rows()
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss(one, ids).backward()
    compiled(other, ids).backward()
    assert_identical(one.grad, other.grad)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[V]] * R), rf"token_ids: got {V} at row 0; takes -1 \(no id\) or a token in \[0, {V}\)"),
        (torch.tensor([[-2]] * R), "token_ids: got -2"),
        (torch.zeros(R, 1), r"token_ids: got dtype torch.float32; takes int32 or int64"),
        (torch.zeros(R, dtype=torch.int64), r"token_ids: got shape \[6\]; takes K ids for each row, \[6, 'K'\]"),
        (torch.zeros(R + 1, 2, dtype=torch.int64), r"token_ids: got shape \[7, 2\]"),
    ],
)
def test_bad_ids_are_refused_by_name(ids: Tensor, message: str) -> None:
    logits, _ = rows()
    with pytest.raises(ValueError, match=message):
        token_logprobs(logits, ids)
    with pytest.raises(ValueError, match=message.replace(" at row 0", "")):
        linear_token_logprobs(torch.randn(R, H), torch.randn(V, H), ids)


def test_the_reference_is_the_softmax_of_torch() -> None:
    logits, ids = rows()
    log_p = torch.log_softmax(logits.double(), -1)
    found = reference.token_logprobs(logits, ids)
    torch.testing.assert_close(found.logprobs, log_p.gather(1, ids))
    rest = torch.ones(R, V, dtype=torch.bool).scatter(1, ids, value=False)
    torch.testing.assert_close(found.tail_logprob, (log_p.exp() * rest).sum(-1).log())
