"""More than 2^31 elements. Memory that is not written takes no room, so only the few rows in use cost memory."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from helpers import assert_entropy, assert_gradient, assert_logprob, random_logits
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference

VOCABULARY = 152_064
ROWS = 2**31 // VOCABULARY + 3
LIVE = [0, 1, ROWS - 4, ROWS - 3, ROWS - 1]  # before 2^31, across it, and after
assert (ROWS - 3) * VOCABULARY < 2**31 < (ROWS - 2) * VOCABULARY


@contextmanager
def within_megabytes(limit: int) -> Iterator[None]:
    """The resident memory of this process may grow by less than `limit` megabytes. (Linux only.)"""

    def used() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20

    before = used()
    yield
    assert used() - before < limit


def assert_near(ours: Iterable[Tensor], exact: Iterable[Tensor]) -> None:
    """Log-probabilities and entropies."""
    for check, one, other in zip((assert_logprob, assert_entropy), ours, exact, strict=True):
        check(one.detach(), other.detach())


def live_mask() -> Tensor:
    return torch.zeros(ROWS, dtype=torch.bool).index_fill(0, torch.tensor(LIVE), True)


def large_logits() -> Tensor:
    logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16)
    logits[LIVE] = random_logits(len(LIVE), VOCABULARY, dtype=torch.bfloat16)
    return logits


def test_scores_and_a_selection_of_a_few_rows_of_many() -> None:
    labels, one = torch.randint(VOCABULARY, (ROWS,)), torch.tensor(1.0)
    with within_megabytes(300):
        logits, mask = large_logits(), live_mask()
        logprob, entropy = d3s.logprob_entropy(logits, labels, mask=mask)
        found = d3s.select_tokens_from_logits(logits, one, 0.5, mask=mask)
    expected = reference.logprob_entropy(logits[LIVE], labels[LIVE])
    assert_near((logprob[LIVE], entropy[LIVE]), expected)
    assert not logprob[~mask].any()
    assert not entropy[~mask].any()
    assert found.mask[LIVE].tolist() == reference.select_tokens(expected[1].float(), one, 0.5).mask.tolist()
    assert found.count == 3  # of 5
    assert_entropy(found.entropy[LIVE], expected[1])


def test_spans_of_many() -> None:
    """Only the kept logits are read: the others have no memory yet, and get none."""
    ids = torch.stack([torch.arange(ROWS) % VOCABULARY, torch.arange(1, ROWS + 1) % VOCABULARY], 1).int().flatten()
    spans = d3s.SamplingMask(ids, torch.arange(ROWS + 1) * 2)
    labels = ids[::2].long()
    with within_megabytes(300):
        logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16)
        logits.view(-1)[torch.arange(ROWS) * VOCABULARY + labels] = 1
        logprob, entropy = d3s.logprob_entropy(logits, labels, sampling_mask=spans)
    expected = reference.logprob_entropy(torch.tensor([1.0, 0.0]), torch.tensor(0))
    assert_near((logprob, entropy), [part.expand(ROWS) for part in expected])


def test_rows_far_apart() -> None:
    """Forward and backward over three rows that lie 2^30 elements apart."""
    with within_megabytes(300):
        logits = torch.empty(2**31 + VOCABULARY, dtype=torch.bfloat16).as_strided((3, VOCABULARY), (2**30, 1))
        logits.copy_(random_logits(3, VOCABULARY))
        logits.requires_grad_()
        exact = logits.detach().double().requires_grad_()
        labels = torch.tensor([5, VOCABULARY - 1, 0])
        gradients = []
        for leaf, function in ((logits, d3s.logprob_entropy), (exact, reference.logprob_entropy)):
            gradients += torch.autograd.grad(sum(function(leaf, labels)).sum(), leaf)
    assert_gradient(*gradients)


@pytest.mark.skipif(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 10 * 2**30, reason="takes 5 GiB")
@pytest.mark.slow("that indices of a gradient, which takes its memory, do not overflow")
def test_gradient_of_many() -> None:
    """The whole gradient is written, so this test does take its memory."""
    logits, mask = large_logits().requires_grad_(), live_mask()
    labels = torch.arange(ROWS)
    (gradient,) = torch.autograd.grad(sum(d3s.logprob_entropy(logits, labels, mask=mask)).sum(), logits)
    exact = logits.detach()[LIVE].double().requires_grad_()
    (expected,) = torch.autograd.grad(sum(reference.logprob_entropy(exact, labels[LIVE])).sum(), exact)
    assert_gradient(gradient[LIVE], expected)
    assert not gradient[2].any()
    assert not gradient[ROWS - 2].any()


def test_many_hidden_states() -> None:
    width = 4096
    rows = 2**31 // width + 2
    live = [3, rows - 3, rows - 2, rows - 1]
    mask = torch.zeros(rows, dtype=torch.bool).index_fill(0, torch.tensor(live), True)
    weight, labels = torch.randn(200, width) / 64, torch.randint(200, (rows,))
    with within_megabytes(300):
        hidden = torch.empty(rows, width)
        hidden[live] = torch.randn(len(live), width)
        logprob, entropy = d3s.linear_logprob_entropy(hidden, weight, labels, mask=mask)
    expected = reference.linear_logprob_entropy(hidden[live], weight, labels[live])
    assert_near((logprob[live], entropy[live]), expected)


@pytest.mark.parametrize("of_into", [torch.bfloat16, torch.float32])
def test_kept_tokens_of_a_large_weight(of_into: torch.dtype) -> None:
    """Weight and gradient have 2^31 elements and more; those of the kept tokens alone are read and written."""
    width = 4096
    tokens = 2**31 // width + 9
    live = torch.tensor([5, tokens // 2, tokens - 11, tokens - 10, tokens - 9, tokens - 1])  # 2^31 is at tokens - 9
    spans = d3s.SamplingMask.from_lists(
        [live[[5, 0, 4]].tolist(), live[1:].tolist(), [tokens - 2], live[[3, 4]].tolist()]
    )
    labels, cotangents = torch.stack([live[4], live[5], torch.tensor(tokens - 2), live[3]]), list(torch.randn(2, 4))
    hidden = torch.randn(4, width).bfloat16().requires_grad_()
    with within_megabytes(300):
        weight, into = torch.empty(tokens, width, dtype=torch.bfloat16), torch.empty(tokens, width, dtype=of_into)
        weight[live] = torch.randn(len(live), width).bfloat16() / 16
        into[live] = 0.0
        weight.requires_grad_()
        given = {"sampling_mask": spans, "max_dense_rows": 0, "weight_grad_into": into}
        results = d3s.linear_logprob_entropy(hidden, weight, labels, **given)
        (gradient,) = torch.autograd.grad(results, hidden, cotangents)
    # The same with few tokens: the live ones, and one for the token that is a single one.
    place = {token: i for i, token in enumerate([*live.tolist(), tokens - 2])}
    few = d3s.SamplingMask.from_lists([[place[token] for token in span] for span in spans.to_lists()])
    exact = [torch.cat([weight.detach()[live].double(), torch.zeros(1, width).double()]), hidden.detach().double()]
    exact = [part.requires_grad_() for part in exact]
    targets = torch.tensor([place[token] for token in labels.tolist()])
    expected = reference.linear_logprob_entropy(*exact[::-1], targets, sampling_mask=few)
    assert_near(results, expected)
    wanted = torch.autograd.grad(expected, exact, [given.double() for given in cotangents])
    assert_gradient(into[live], wanted[0][:-1])
    assert_gradient(gradient, wanted[1])


def test_compact_of_many() -> None:
    mask = torch.from_numpy(numpy.zeros(2**31 + 100, dtype=numpy.bool_))  # unlike torch's, these zeros are not written
    places = [7, 2**31 - 1, 2**31, 2**31 + 99]
    mask[places] = True
    indices, count = d3s.compact(mask, 6)
    assert indices.tolist() == [*places, -1, -1]
    assert count.item() == 4
