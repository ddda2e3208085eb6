"""The k largest log-probabilities of each row: ties, special values, tiles, threads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases.topk_logprobs import entry_of, logit_and_id
from helpers import DTYPES, INF, NAN, assert_same, compiled_once, random_logits, threads, whole_number_product
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels._segments.topk_entry import NO_ENTRY, ids_of

OPS = torch.ops.d3s_kernels
LOWEST = torch.finfo(torch.float32).min


def nothing(rows: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([LOWEST, 0.0, 0.0, NAN]).repeat(rows, 1), torch.full((rows, k), NO_ENTRY)


def after_tiles(logits: Tensor, k: int, edges: list[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The states and the entries of rows whose vocabulary is cut at ``edges``."""
    state, best = nothing(logits.shape[:-1].numel(), k)
    for first, last in pairwise(edges):
        OPS.topk_softmax_state_(state, best, logits[..., first:last], first, temperature)
    return state, best


def assert_right(logits: Tensor, k: int) -> None:
    columns, flat = logits.shape[-1], logits.flatten(0, -2)
    state, best = after_tiles(logits, k, [0, columns])
    numbers = [(~row.isnan()).nonzero().view(-1) for row in flat]
    for row, known in enumerate(numbers):
        in_order = known[torch.sort(flat[row, known].double(), descending=True, stable=True).indices]
        chosen = in_order[:k]
        assert ids_of(best)[row].tolist() == chosen.tolist() + [-1] * (k - len(chosen))
        rest = flat[row].double().index_fill(0, chosen, -INF)
        top = float(rest.nan_to_num(-INF, neginf=-INF, posinf=INF).max())
        if rest.isnan().any() or top == INF:
            assert state[row, 2].isnan()
        elif top == -INF:
            assert state[row, 1] < 0.5
        else:
            e = (rest - top).exp()
            terms = torch.where(rest == -INF, 0.0, (rest - top) * e)
            assert state[row, 0] == top
            torch.testing.assert_close(state[row, 1].double(), e.sum(), rtol=3e-6, atol=0)
            torch.testing.assert_close(state[row, 2].double(), terms.sum(), rtol=3e-6, atol=1e-4)
            assert state[row, 3].isnan()


def adversarial(columns: int) -> dict[str, Tensor]:
    """Two rows of each kind. Kernels look for few logits that are larger than all others."""
    logits, place = random_logits(2, columns), torch.arange(columns).float().expand(2, -1)
    some = torch.rand(2, columns)
    return {
        "normal": logits,
        "equal": torch.full((2, columns), -1.5),
        "ascending": 8 * place / columns,
        "descending": -8 * place / columns,
        "few values": logits.round(),
        "both zeros": torch.where(some < 0.5, 0.0, -0.0),
        "nothing but -inf": torch.full((2, columns), -INF),
        "nothing but NaN": torch.full((2, columns), NAN),
        "few above -inf": logits.masked_fill(some > 20 / columns, -INF),
        "NaN": logits.masked_fill(some < 0.3, NAN),
        "+inf": logits.masked_fill(some < 3 / columns, INF),
    }


KINDS = [*adversarial(1)]


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_logits(kind: str, dtype: torch.dtype) -> None:
    """More columns than a slice of any kernel."""
    for columns, k in ((1, 1), (70, 70), (5000, 64), (33_000, 100)):
        assert_right(adversarial(columns)[kind].to(dtype), k)


def test_the_largest_k() -> None:
    assert_right(random_logits(2, 40_000), 1024)
    assert_right(random_logits(2, 1024), 1024)


def test_an_entry_is_a_logit_and_an_id() -> None:
    logits = torch.tensor([[2.0, -INF, -0.0, 0.0, -3.5, INF]])
    _, best = after_tiles(logits, 6, [0, 6])
    assert [logit_and_id(entry) for entry in best[0].tolist()] == [
        (INF, 5), (2.0, 0), (0.0, 2), (0.0, 3), (-3.5, 4), (-INF, 1)
    ]  # fmt: skip
    assert best[0].tolist() == sorted((entry_of(z, i) for i, z in enumerate(logits[0].tolist())), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 300])
def test_tiles_change_no_bit(k: int, dtype: torch.dtype) -> None:
    """Tiles are cut at multiples of 32,768, between slices of every kernel."""
    logits = random_logits(3, 70_000, dtype=dtype)
    whole = after_tiles(logits, k, [0, 70_000], 0.7)
    assert_same(whole, after_tiles(logits, k, [0, 32_768, 65_536, 70_000], 0.7))
    assert_same(whole, after_tiles(logits, k, [0, 65_536, 65_536, 70_000, 70_000], 0.7))


def test_tiles_in_another_order_have_the_same_entries() -> None:
    logits = random_logits(40, 300).round()
    _, expected = after_tiles(logits, 20, [0, 300])
    state, best = nothing(40, 20)
    for first in (200, 0, 100):
        OPS.topk_softmax_state_(state, best, logits[:, first : first + 100], first)
    assert torch.equal(best, expected)


@pytest.mark.simd
def test_other_rows_and_threads_change_no_bit() -> None:
    """A few rows are computed slice by slice, many rows one by one."""
    logits = random_logits(20, 20_000)
    expected = after_tiles(logits, 50, [0, 20_000])
    with threads(1):
        assert_same(expected, after_tiles(logits, 50, [0, 20_000]))
    for row in (0, 7, 19):
        state, best = after_tiles(logits[row], 50, [0, 20_000])
        assert_same((state[0], best[0]), (expected[0][row], expected[1][row]))


def test_masked_rows_stay() -> None:
    logits, mask = random_logits(4, 50), torch.tensor([True, False, True, False])
    logits[1] = NAN
    state, best = nothing(4, 3)
    OPS.topk_softmax_state_(state, best, logits, None, 1.0, None, mask)
    expected = after_tiles(logits, 3, [0, 50])
    before = nothing(4, 3)
    for row in range(4):
        assert_same((state[row], best[row]), [part[row] for part in (expected if mask[row] else before)])


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 50), (3, 0), (0, 0)):
        state, best = nothing(shape[0], 3)
        OPS.topk_softmax_state_(state, best, torch.zeros(shape))
        assert_same((state, best), nothing(shape[0], 3))
    assert d3s.topk_logprobs(torch.zeros(0, 5), 2).token_ids.shape == (0, 2)


def assert_found(found: d3s.TopkLogprobs, expected: reference.TopkLogprobs) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-22, atol=1e-5, equal_nan=True)


def test_the_head_finds_what_its_logits_have() -> None:
    """Products of whole numbers are exact, in any order of the terms, and have ties."""
    hidden, weight = whole_number_product(2, 5, vocabulary=33_000)
    mask = torch.tensor([[True, False, True, True, True], [False] * 5])
    for options in ({}, {"temperature": 0.7 + torch.rand(2, 5)}, {"mask": mask}, {"mask": mask, "max_rows": 4}):
        expected = d3s.linear_topk_logprobs(hidden, weight, 100, **options)
        assert_found(expected, reference.linear_topk_logprobs(hidden, weight, 100, **options))
        for workspace_bytes in (1, 4 * 10 * 32_768):
            found = d3s.linear_topk_logprobs(hidden, weight, 100, workspace_bytes=workspace_bytes, **options)
            assert_same(found, expected)
    too_many = d3s.linear_topk_logprobs(hidden, weight, 2, mask=mask, max_rows=3)
    assert (too_many.token_ids == -1).all()
    assert all(part.isnan().all() for part in too_many[1:])
    without_mask = d3s.linear_topk_logprobs(hidden, weight, 2, max_rows=9)
    assert_same(without_mask, too_many)


def test_what_is_left_is_accurate_where_nearly_nothing_is_left() -> None:
    """1 minus the sum of the others would be 0."""
    logits = torch.full((1, 50_000), -40.0)
    logits[0, 7] = 0
    found = d3s.topk_logprobs(logits, 1)
    assert_found(found, reference.topk_logprobs(logits, 1))
    assert -29.2 < float(found.tail_logprob) < -29.1
    whole = d3s.topk_logprobs(logits[:, :20], 20)
    assert whole.tail_logprob == -INF


def test_the_ids_are_those_of_token_logprobs() -> None:
    logits = random_logits(3, 4, 500)
    largest = d3s.topk_logprobs(logits, 30, temperature=0.8)
    given = d3s.token_logprobs(logits, largest.token_ids, temperature=0.8)
    torch.testing.assert_close(largest.logprobs, given.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(largest.tail_logprob, given.tail_logprob, rtol=0, atol=1e-5)


def test_no_result_has_a_gradient() -> None:
    logits = random_logits(2, 40).requires_grad_()
    hidden, weight = torch.randn(2, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    for found in (d3s.topk_logprobs(logits, 3), d3s.linear_topk_logprobs(hidden, weight, 3)):
        assert not any(part.requires_grad for part in found)


def test_it_compiles_whole() -> None:
    def both(logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return *d3s.topk_logprobs(logits, 3), *d3s.linear_topk_logprobs(hidden, weight, 3)

    compiled = compiled_once(both)
    for rows in (4, 6, 9):
        given = random_logits(rows, 40), *whole_number_product(rows, vocabulary=40)
        assert_same(compiled(*given), both(*given))


def test_what_is_refused() -> None:
    logits, hidden, weight = torch.zeros(3, 20), torch.zeros(3, 4), torch.zeros(20, 4)

    def refused(said: str, function: Callable[..., Any], *given: Any, error: type = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=f"^{said}"):
            function(*given, **options)

    for k in (0, -1, 21, 1025):
        said = rf"k: got {k}; takes 1 to 1024, and at most the size of the vocabulary, 20$"
        refused(said, d3s.topk_logprobs, logits, k)
        refused(said, d3s.linear_topk_logprobs, hidden, weight, k)
    refused("k: got 2.0; takes a whole number", d3s.topk_logprobs, logits, 2.0, error=TypeError)
    refused("logits: got a 0-d tensor", d3s.topk_logprobs, torch.tensor(0.0), 1)
    refused("temperature: got 0; takes a number above 0", d3s.topk_logprobs, logits, 2, temperature=0.0)
    refused("mask: got shape", d3s.topk_logprobs, logits, 2, mask=torch.ones(2).bool())
    state, best = nothing(3, 2)
    takes = r"takes contiguous int64 \[rows, k\] with k from 1 to 1024"
    for bad in (best[:2], best.int(), best[:, :0], torch.zeros(3, 1025).long(), best.T.contiguous().T):
        refused(rf"best: got shape .*{takes}", OPS.topk_softmax_state_, state, bad, logits)
    refused("first_token: got 2147483640 for 20 columns", OPS.topk_softmax_state_, state, best, logits, 2**31 - 8)
