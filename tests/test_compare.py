"""compare: a user's call on every back-end, compared with the reference."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from helpers import assert_same_bits, unwritten
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import _torch
from d3s_kernels._dispatch import backends
from d3s_kernels.check.tolerances import FUNCTIONS, Row

here = pytest.mark.skipif(backends.forced_backend is not None, reason="a back-end is forced")


@here
def test_a_row_for_each_back_end_and_result() -> None:
    logits, labels = torch.randn(3, 9, requires_grad=True), torch.tensor([1, -100, 8])
    found = d3s.compare(d3s.logprob_entropy, logits, labels, temperature=0.7)
    outputs = ["logprob", "entropy", "gradient of logits"]
    assert [(row.backend, row.output) for row in found] == [*product(("cpu", "torch"), outputs)]
    assert found.agrees
    assert all(0 <= row.share < 1 for row in found)
    assert all(len(row.index) == (2 if "gradient" in row.output else 1) for row in found if row.index is not None)


@here
def test_what_is_wrong_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(scores: Tensor, *arguments: object, **options: object) -> Tensor:
        mask = right(scores, *arguments, **options)
        mask[..., -1] = ~mask[..., -1]
        return mask

    right = _torch.KERNELS["topk_mask"]
    monkeypatch.setitem(_torch.KERNELS, "topk_mask", off_by_one)
    found = d3s.compare(d3s.topk_mask, torch.tensor([[3.0, 1.0, 2.0]]), k=1)
    assert not found.agrees
    assert [tuple(row) for row in found] == [("cpu", "mask", (0, 0), 0.0, 0.0), ("torch", "mask", (0, 2), 1.0, 0.0)]
    assert str(found) == (
        "back-end  output  index   largest error  allowed\n"
        "cpu       mask    [0, 0]  0              0\n"
        "torch     mask    [0, 2]  1              0        WRONG"
    )


@here
def test_a_back_end_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setitem(_torch.KERNELS, "compact", broken)
    right, wrong = d3s.compare(d3s.compact, torch.tensor([True]), 1)[-2:]
    assert (right.backend, right.agrees) == ("cpu", True)
    assert wrong == ("torch", "RuntimeError: no compiler", None, math.inf, 0.0)


@pytest.mark.parametrize("place", [0, 5])
def test_not_a_number_and_infinity_are_no_small_errors(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = FUNCTIONS["entropy"].results
    for value in (math.nan, math.inf):

        def entropy(logits: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None, value: float = value):
            return torch.full((6,), 1e-7, dtype=torch.float64).index_fill(0, torch.tensor([place]), value)

        monkeypatch.setitem(FUNCTIONS, "entropy", Row(entropy, results))
        found = d3s.compare(d3s.entropy, torch.zeros(6, 1))
        assert [(part.index, part.error) for part in found] == [((place,), math.inf)] * len(found)


def test_what_everybody_refuses_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^ratio: got 2; takes a number in \(0, 1\]"):
        d3s.compare(d3s.topk_mask, torch.rand(3), 2.0)


@pytest.mark.parametrize(
    "function", [torch.topk, d3s.plan_rollouts, torch.ops.d3s_kernels.vocab_parallel_logprob_entropy, "topk_mask"]
)
def test_a_function_of_somebody_else_is_refused(function: object) -> None:
    with pytest.raises(TypeError, match=r"^function: got .*; takes an op of torch.ops.d3s_kernels that"):
        d3s.compare(function, torch.rand(3))  # type: ignore[arg-type]


def test_a_process_group_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^process_group: got one; takes none"):
        d3s.compare(d3s.topk_mask, torch.rand(3), 0.5, process_group=object())


def test_ops_are_compared_too_and_nothing_is_written() -> None:
    keys = torch.ops.d3s_kernels.topk_order_keys(torch.rand(40))
    search = torch.zeros(1, 3, dtype=torch.int64)
    counts = torch.ops.d3s_kernels.topk_count_digit(keys, search, 24, 8)
    with unwritten(keys, search, counts):
        found = d3s.compare(torch.ops.d3s_kernels.topk_choose_digit_, search, counts, 24, k=3)
    assert found.agrees
    assert {row.output for row in found} == {"search"}


@here
def test_gradients_of_ops_are_compared_too() -> None:
    hidden, weight, labels = torch.randn(3, 5), torch.randn(9, 5, requires_grad=True), torch.tensor([1, -100, 8])
    found = d3s.compare(torch.ops.d3s_kernels.linear_logprob_entropy, hidden, weight, labels)
    outputs = ["logprob", "entropy", "row_max", "log_sum", "kept_logits", "gradient of weight"]
    assert [row.output for row in found] == 2 * outputs
    assert found.agrees


def test_what_is_random_is_the_same_for_all() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(4, 50)
    before, seed = generator.get_state(), torch.get_rng_state()
    for rule in ("random", "highest"):
        options = {"generator": generator} if rule == "random" else {}
        assert d3s.compare(d3s.select_rollouts, values, 3, rule=rule, **options).agrees
    assert d3s.compare(d3s.select_tokens, values, None, 0.2, rule="random").agrees
    assert_same_bits(generator.get_state(), before)
    assert_same_bits(torch.get_rng_state(), seed)
