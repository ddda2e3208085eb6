"""More than 2^31 elements. Memory that is not written takes no room, so only the few rows in use cost memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from helpers import assert_entropy, assert_gradient, assert_logprob, random_logits

from d3s_kernels import (
    SamplingMask,
    compact,
    linear_logprob_entropy,
    logprob_entropy,
    reference,
    select_tokens_from_logits,
)

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


def live_mask() -> torch.Tensor:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[LIVE] = True
    return mask


def large_logits() -> torch.Tensor:
    logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16)
    logits[LIVE] = random_logits(len(LIVE), VOCABULARY, dtype=torch.bfloat16)
    return logits


def test_masked_rows_of_many() -> None:
    labels = torch.randint(VOCABULARY, (ROWS,))
    with within_megabytes(300):
        logits, mask = large_logits(), live_mask()
        logprob, entropy = logprob_entropy(logits, labels, mask=mask)
    expected = reference.logprob_entropy(logits[LIVE], labels[LIVE])
    assert_logprob(logprob[LIVE], expected[0])
    assert_entropy(entropy[LIVE], expected[1])
    assert not logprob[~mask].any()
    assert not entropy[~mask].any()


def test_selection_from_many() -> None:
    with within_megabytes(300):
        logits, mask = large_logits(), live_mask()
        found = select_tokens_from_logits(logits, torch.tensor(1.0), 0.5, mask=mask)
    expected = reference.select_tokens(reference.entropy(logits[LIVE]).float(), torch.tensor(1.0), 0.5)
    assert found.mask[LIVE].tolist() == expected.mask.tolist()
    assert found.count == 3  # of 5
    assert_entropy(found.entropy[LIVE], reference.entropy(logits[LIVE]))


def test_spans_of_many() -> None:
    """Only the kept logits are read: the others have no memory yet, and get none."""
    ids = torch.stack([torch.arange(ROWS) % VOCABULARY, torch.arange(1, ROWS + 1) % VOCABULARY], 1).int().flatten()
    spans = SamplingMask(ids, torch.arange(ROWS + 1) * 2)
    labels = ids[::2].long()
    with within_megabytes(300):
        logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16)
        logits.view(-1)[torch.arange(ROWS) * VOCABULARY + labels] = 1
        logprob, entropy = logprob_entropy(logits, labels, sampling_mask=spans)
    expected = reference.logprob_entropy(torch.tensor([1.0, 0.0]), torch.tensor(0))
    assert_logprob(logprob, expected[0].expand(ROWS))
    assert_entropy(entropy, expected[1].expand(ROWS))


def test_rows_far_apart() -> None:
    """Forward and backward over three rows that lie 2^30 elements apart."""
    with within_megabytes(300):
        logits = torch.empty(2**31 + VOCABULARY, dtype=torch.bfloat16).as_strided((3, VOCABULARY), (2**30, 1))
        logits.copy_(random_logits(3, VOCABULARY))
        logits.requires_grad_()
        exact = logits.detach().double().requires_grad_()
        labels = torch.tensor([5, VOCABULARY - 1, 0])
        gradients = []
        for leaf, function in ((logits, logprob_entropy), (exact, reference.logprob_entropy)):
            gradients += torch.autograd.grad(sum(function(leaf, labels)).sum(), leaf)
    assert_gradient(*gradients)


@pytest.mark.skipif(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 10 * 2**30, reason="takes 5 GiB")
@pytest.mark.slow("that indices of a gradient, which takes its memory, do not overflow")
def test_gradient_of_many() -> None:
    """The whole gradient is written, so this test does take its memory."""
    logits, mask = large_logits().requires_grad_(), live_mask()
    labels = torch.arange(ROWS)
    (gradient,) = torch.autograd.grad(sum(logprob_entropy(logits, labels, mask=mask)).sum(), logits)
    exact = logits.detach()[LIVE].double().requires_grad_()
    (expected,) = torch.autograd.grad(sum(reference.logprob_entropy(exact, labels[LIVE])).sum(), exact)
    assert_gradient(gradient[LIVE], expected)
    assert not gradient[2].any()
    assert not gradient[ROWS - 2].any()


def test_many_hidden_states() -> None:
    width = 4096
    rows = 2**31 // width + 2
    live = [3, rows - 3, rows - 2, rows - 1]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[live] = True
    weight, labels = torch.randn(200, width) / 64, torch.randint(200, (rows,))
    with within_megabytes(300):
        hidden = torch.empty(rows, width)
        hidden[live] = torch.randn(len(live), width)
        logprob, entropy = linear_logprob_entropy(hidden, weight, labels, mask=mask)
    expected = reference.linear_logprob_entropy(hidden[live], weight, labels[live])
    assert_logprob(logprob[live], expected[0])
    assert_entropy(entropy[live], expected[1])


@pytest.mark.parametrize("of_into", [torch.bfloat16, torch.float32])
def test_kept_tokens_of_a_large_weight(of_into: torch.dtype) -> None:
    """Weight and gradient have 2^31 elements and more; those of the kept tokens alone are read and written."""
    width = 4096
    tokens = 2**31 // width + 9
    live = torch.tensor([5, tokens // 2, tokens - 11, tokens - 10, tokens - 9, tokens - 1])  # 2^31 is at tokens - 9
    spans = SamplingMask.from_lists([live[[5, 0, 4]].tolist(), live[1:].tolist(), [tokens - 2], live[[3, 4]].tolist()])
    labels, cotangents = torch.stack([live[4], live[5], torch.tensor(tokens - 2), live[3]]), list(torch.randn(2, 4))
    hidden = torch.randn(4, width).bfloat16().requires_grad_()
    with within_megabytes(300):
        weight, into = torch.empty(tokens, width, dtype=torch.bfloat16), torch.empty(tokens, width, dtype=of_into)
        weight[live] = torch.randn(len(live), width).bfloat16() / 16
        into[live] = 0.0
        weight.requires_grad_()
        given = {"sampling_mask": spans, "max_dense_rows": 0, "weight_grad_into": into}
        results = linear_logprob_entropy(hidden, weight, labels, **given)
        (gradient,) = torch.autograd.grad(results, hidden, cotangents)
    # The same with few tokens: the live ones, and one for the token that is a single one.
    place = {token: i for i, token in enumerate([*live.tolist(), tokens - 2])}
    few = SamplingMask.from_lists([[place[token] for token in span] for span in spans.to_lists()])
    exact = [torch.cat([weight.detach()[live].double(), torch.zeros(1, width).double()]), hidden.detach().double()]
    exact = [part.requires_grad_() for part in exact]
    targets = torch.tensor([place[token] for token in labels.tolist()])
    expected = reference.linear_logprob_entropy(*exact[::-1], targets, sampling_mask=few)
    assert_logprob(results[0].detach(), expected[0].detach())
    assert_entropy(results[1].detach(), expected[1].detach())
    wanted = torch.autograd.grad(expected, exact, [given.double() for given in cotangents])
    assert_gradient(into[live], wanted[0][:-1])
    assert_gradient(gradient, wanted[1])


def test_compact_of_many() -> None:
    mask = torch.from_numpy(numpy.zeros(2**31 + 100, dtype=numpy.bool_))  # unlike torch's, these zeros are not written
    places = [7, 2**31 - 1, 2**31, 2**31 + 99]
    mask[places] = True
    indices, count = compact(mask, 6)
    assert indices.tolist() == [*places, -1, -1]
    assert count.item() == 4
