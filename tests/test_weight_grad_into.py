"""weight_grad_into: the weight's gradient is added to a tensor of the caller's."""

import sys
from collections.abc import Sequence

import pytest
import torch
from helpers import (
    DTYPES,
    assert_gradient,
    assert_identical,
    assert_same_bits,
    random_labels,
    slow_elsewhere,
    whole_number_product,
)
from test_head import Head, random_head
from torch import Tensor

from d3s_kernels import linear_logprob_entropy

HALF = torch.bfloat16
# Bytes of logits, for 40 rows and 20,000 tokens: one tile; slabs of tokens; tiles of rows and slabs of tokens.
WORKSPACES = (None, 40 * 4 * 8192, 16 * 4 * 8192)


def gradients(head: Head, labels: Tensor, into: Tensor | None, weights: Tensor, **options: object) -> tuple:
    leaves = head.requiring_grad()
    results = leaves(linear_logprob_entropy, labels, weight_grad_into=into, **options)
    (torch.stack(results) * weights).sum().backward()
    return tuple(leaf.grad for leaf in leaves.leaves)


def assert_same_products(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """The same bits. Where the ops alone run on a GPU (on_cuda.py), what an op multiplies is multiplied there, and what
    autograd calls from Python is multiplied here; tests/cuda has the test of the bits.
    """
    for one, other in zip(ours, plain, strict=True):
        if "on_cuda" in sys.modules:
            assert_gradient(one, other.double())
        else:
            assert_same_bits(one, other)


@pytest.mark.parametrize("workspace_bytes", WORKSPACES)
@pytest.mark.parametrize(
    ("dtype", "of_into"),
    [
        (torch.float32, torch.float32),
        slow_elsewhere(HALF, torch.float32, shows="half precision, added in float32"),
        *(slow_elsewhere(dtype, dtype, shows=f"sums in {dtype}") for dtype in DTYPES if dtype != torch.float32),
    ],
)
def test_the_gradient_is_added(dtype: torch.dtype, of_into: torch.dtype, workspace_bytes: int | None) -> None:
    """Over two micro-batches, to what is there; the other gradients keep their bits, and autograd gives none."""
    head = random_head(40, vocabulary=20_000, dtype=dtype)
    before = (0.1 * torch.randn(20_000, 16)).to(of_into)
    into, expected = before.clone(), before.double()
    for _ in range(2):
        labels, weights = random_labels(40, vocabulary=20_000), torch.randn(2, 40)
        plain = gradients(head, labels, None, weights, workspace_bytes=workspace_bytes)
        ours = gradients(head, labels, into, weights, workspace_bytes=workspace_bytes)
        assert ours[1] is None
        assert_same_products(ours[::2], plain[::2])
        expected += plain[1].double()
    # Each of the two gradients in half precision, or each of the two sums, may be rounded otherwise.
    step = 1e-6 if of_into == dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert (into.double() - expected).norm() <= step * expected.norm()


def test_only_rows_with_a_gradient_are_read() -> None:
    head, labels, into = random_head(9), torch.arange(9), torch.ones(300, 16)
    head.hidden[1] = torch.nan
    leaves = head.requiring_grad()
    total = sum(leaves(linear_logprob_entropy, labels, weight_grad_into=into))
    torch.autograd.grad(torch.where(labels % 3 == 0, total, 0).sum(), (leaves.hidden, leaves.bias))
    assert into.isfinite().all()
    assert (into != 1).any()


@pytest.mark.parametrize("rows", [0, 5])
def test_without_a_row_nothing_is_added(rows: int) -> None:
    into = torch.randn(300, 16)
    before = into.clone()
    gradients(random_head(rows), torch.full((rows,), -100), into, torch.tensor([[1.0], [0.0]]))
    assert_same_bits(into, before)


def test_a_weight_without_a_gradient_adds_nothing() -> None:
    head, labels, into = random_head(5), torch.arange(5), torch.zeros(300, 16)
    leaves = head.requiring_grad()
    results = leaves._replace(weight=head.weight)(linear_logprob_entropy, labels, weight_grad_into=into)
    found = torch.autograd.grad(sum(results).sum(), (leaves.hidden, leaves.bias))
    assert_same_products(found, gradients(head, labels, None, torch.ones(2, 5))[::2])
    with torch.no_grad():
        leaves(linear_logprob_entropy, labels, weight_grad_into=into)
    assert not into.any()


@pytest.mark.parametrize("bound", [0, 4])
def test_more_gradients_than_max_grad_rows_make_it_nan(bound: int) -> None:
    into = torch.zeros(300, 16)
    of_hidden, _, of_bias = gradients(random_head(9), torch.arange(9), into, torch.ones(2, 9), max_grad_rows=bound)
    assert all(gradient.isnan().all() for gradient in (of_hidden, into, of_bias))


def test_the_same_bits_from_run_to_run_and_twice_as_much_from_two_backwards() -> None:
    hidden, weight = whole_number_product(40, vocabulary=300)
    labels, added = random_labels(40, vocabulary=300), []
    for _ in range(2):
        into, leaf = torch.zeros(300, 16), weight.clone().requires_grad_()
        loss = sum(linear_logprob_entropy(hidden, leaf, labels, weight_grad_into=into)).sum()
        loss.backward(retain_graph=True)
        added.append(into.clone())
        loss.backward()
        assert_identical(into, 2 * added[-1])
    assert_same_bits(*added)


def test_a_tied_weight_and_its_hooks() -> None:
    """The embedding's gradient comes through autograd, and so do hooks, for that part alone."""
    embedding, labels = (random_head(1).weight / 10).requires_grad_(), torch.arange(6)
    plain = embedding.detach().clone().requires_grad_()
    for weight, into in ((plain, None), (embedding, torch.zeros(300, 16))):
        seen: list[Tensor] = []
        weight.register_hook(seen.append)
        hidden = torch.nn.functional.embedding(labels + 1, weight)
        sum(linear_logprob_entropy(hidden, weight, labels, weight_grad_into=into)).sum().backward()
        assert len(seen) == 1
        if into is not None:
            assert_gradient(into + weight.grad, plain.grad.double())
            assert seen[0][0].eq(0).all()  # token 0 is a label, and no input


def test_a_changed_weight_is_seen() -> None:
    head = random_head(5).requiring_grad()
    loss = sum(head(linear_logprob_entropy, torch.arange(5), weight_grad_into=head.weight.detach()))
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_no_second_derivative() -> None:
    head = random_head(5).requiring_grad()
    logprob, _ = head(linear_logprob_entropy, torch.arange(5), weight_grad_into=torch.zeros(300, 16))
    with pytest.raises(RuntimeError, match="once, not twice; got a backward with create_graph=True"):
        torch.autograd.grad(logprob.sum(), head.hidden, create_graph=True)


WRONG = (
    (torch.zeros(299, 16), ValueError, r"got shape \[299, 16\].*takes a contiguous tensor.*\[300, 16\]"),
    (torch.zeros(16, 300).T, ValueError, r"strides \[1, 300\]; takes a contiguous tensor"),
    (torch.zeros(300, 16, dtype=HALF), ValueError, "got dtype torch.bfloat16; takes float32 or the dtype of weight"),
    (torch.zeros(300, 16, requires_grad=True), ValueError, "requires a gradient; takes one that does not"),
    (torch.zeros(300, 16, device="meta"), ValueError, "is on meta; takes a tensor on the device of the others"),
    (0, TypeError, "got int; takes a tensor or None"),
)


@pytest.mark.parametrize(("into", "error", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_what_is_refused(into: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"weight_grad_into: .*{said}"):
        random_head(5)(linear_logprob_entropy, torch.arange(5), weight_grad_into=into)


@pytest.mark.slow_elsewhere("nothing more: what refuses is above the kernels")
def test_a_compiled_loss_is_refused() -> None:
    compiled = torch.compile(linear_logprob_entropy, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="weight_grad_into: got a tensor in torch"):
        random_head(5).requiring_grad()(compiled, torch.arange(5), weight_grad_into=torch.zeros(300, 16))
