"""The ops on logits with a sampling mask. What the table draws is compared with the reference in test_table.py; here
are the cases that it cannot draw.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from cases.coverage import replaced
from helpers import (
    DTYPES,
    INF,
    NAN,
    assert_entropy,
    assert_gradient,
    assert_logprob,
    assert_same,
    random_logits,
    slow,
    threads,
)
from torch import Tensor

from d3s_kernels import SamplingMask, logprob_entropy, reference, select_tokens_from_logits
from d3s_kernels._dispatch import backends

Results = tuple[Tensor, ...]


def random_spans(lengths: list[int], vocabulary: int) -> tuple[SamplingMask, Tensor]:
    """Spans of these lengths, in any order, and a label in each: any token where the span is empty."""
    spans = [torch.randperm(vocabulary)[:length] for length in lengths]
    labels = [span[int(torch.randint(len(span), ()))] if len(span) else torch.randint(vocabulary, ()) for span in spans]
    offsets = torch.tensor([0, *accumulate(lengths)])
    return SamplingMask(torch.cat([*spans, torch.empty(0)]).int(), offsets), torch.tensor(labels, dtype=torch.int64)


def touched_by(mask: SamplingMask, vocabulary: int) -> Tensor:
    """The tokens of the spans that are computed: those of more than one token."""
    tokens = [token for span in mask.to_lists() if len(span) > 1 for token in span]
    return torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, torch.tensor(tokens, dtype=torch.int64), True)


def with_gradient(logits: Tensor, labels: Tensor, **options: object) -> Results:
    """logprob, entropy, and the gradient of both together."""
    leaf = logits.detach().requires_grad_()
    results = logprob_entropy(leaf, labels, **options)  # type: ignore[arg-type]
    weights = [torch.linspace(1, 2, labels.numel()).view(labels.shape), torch.ones(labels.shape)]
    return *(result.detach() for result in results), *torch.autograd.grad(results, leaf, weights)


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5000, slow(256_000, shows="a large vocabulary")])
def test_spans_of_all_lengths_beside_each_other(vocabulary: int, dtype: torch.dtype) -> None:
    mask, labels = random_spans([1, 5000, 2, 1024, 1025, 3, 0, 31, 33, 4097], vocabulary)
    logits, heat = random_logits(10, vocabulary, dtype=dtype), 0.5 + torch.rand(10)
    found = with_gradient(logits, labels, sampling_mask=mask, temperature=heat)
    exact = logits.double().requires_grad_()
    expected = reference.logprob_entropy(exact, labels, sampling_mask=mask, temperature=heat)
    assert_logprob(found[0], expected[0])
    assert_entropy(found[1], expected[1])
    weights = [torch.linspace(1, 2, 10).double(), torch.ones(10).double()]
    for ours, theirs in zip(found[2], torch.autograd.grad(expected, exact, weights)[0], strict=True):
        assert_gradient(ours, theirs, floor=1e-5)
        assert ((ours == 0) | (theirs != 0)).all()  # nothing outside of the span


@pytest.mark.skipif(backends.forced_backend is not None or replaced(), reason="the order of sums of the CPU's kernels")
@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_span_is_a_row_of_so_many_logits(dtype: torch.dtype) -> None:
    mask, labels = random_spans([2, 17, 8192, 9000, 12_000], 20_000)
    logits = random_logits(5, 20_000, dtype=dtype)
    found = logprob_entropy(logits, labels, sampling_mask=mask, temperature=0.7)
    for row, span in enumerate(mask.to_lists()):
        place = torch.tensor([span.index(int(labels[row]))])
        alone = logprob_entropy(logits[row, span].unsqueeze(0), place, temperature=0.7)
        assert_same([result[row] for result in found], [result[0] for result in alone])


def test_a_single_kept_token_is_not_read() -> None:
    mask, labels = SamplingMask.from_lists([[7], [49], [0], [7]]), torch.tensor([7, 49, -100, 7])
    options = {"sampling_mask": mask, "temperature": 0.3, "max_dense_rows": 0}
    found = with_gradient(torch.full((4, 50), NAN), labels, **options)
    assert_same(found, map(torch.zeros_like, found))


def test_what_was_not_kept_is_not_seen() -> None:
    (mask, labels), logits = random_spans([2, 5, 64, 2000], 3000), random_logits(4, 3000)
    strange = torch.tensor([NAN, INF, NAN, -INF]).view(4, 1).repeat(1, 3000)
    for row, span in enumerate(mask.to_lists()):
        strange[row, span] = logits[row, span]
    assert_same(*(with_gradient(part, labels, sampling_mask=mask) for part in (strange, logits)))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_kept_logit_that_is_no_number(value: float) -> None:
    logits, mask = random_logits(3, 100), SamplingMask.from_lists([[5, 9], [9, 5, 2], [4, 5]])
    logits[1, 9] = value
    logprob, entropies, slope = with_gradient(logits, torch.tensor([5, 5, 5]), sampling_mask=mask)
    for result in (logprob, entropies, slope.sum(1)):
        assert result.isnan().tolist() == [False, True, False]
    assert slope[1].isnan().all()


def test_a_bad_id_has_no_token_in_the_reference_either() -> None:
    """A GPU's kernels give NaN for such a row, which the host cannot refuse."""
    mask = SamplingMask(torch.tensor([3, 0, 4], dtype=torch.int32), torch.tensor([0, 1, 3]))
    found = reference.logprob_entropy(torch.zeros(2, 4), torch.tensor([3, 0]), sampling_mask=mask)
    assert [result.isnan().tolist() for result in found] == [[False, True]] * 2


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    mask, labels = random_spans([1, 9, 2000, 2, 0, 40, 1500, 3], 4000)
    logits, weights = random_logits(8, 4000), torch.linspace(1, 2, 8)

    def call(rows: list[int]) -> Results:
        leaf = logits[rows].requires_grad_()
        results = logprob_entropy(leaf, labels[rows], sampling_mask=mask.index_select(rows))
        slope = torch.autograd.grad(results, leaf, [weights[rows], torch.ones(len(rows))])
        return *(result.detach() for result in results), *slope

    everything = call(list(range(8)))
    for rows in ([6], [4, 2], [7, 6, 5, 4, 3, 2, 1, 0], list(range(8))):
        assert_same(call(rows), [result[rows] for result in everything])


@pytest.mark.skipif(backends.forced_backend is not None or replaced(), reason="the threads of the CPU's kernels")
def test_a_row_has_the_same_bits_with_any_number_of_threads() -> None:
    (mask, labels), logits = random_spans([1, 9, 2000, 2, 0, 40] * 100, 3000), random_logits(600, 3000)
    with threads(1):
        expected = with_gradient(logits, labels, sampling_mask=mask)
    for count in (2, 3):
        with threads(count):
            assert_same(with_gradient(logits, labels, sampling_mask=mask), expected)


def test_single_tokens_count_and_score_nothing() -> None:
    mask, _ = random_spans([1, 6, 1, 9, 1, 1], 50)
    logits, advantages = torch.randn(6, 50), torch.tensor(1.0)
    found = select_tokens_from_logits(logits.unsqueeze(0), advantages, 0.5, sampling_mask=mask, max_dense_rows=0)
    assert found.count == 3  # half of six, so that one of them scores 0
    assert found.mask.tolist() == [[True, True, False, True, False, False]]
    without = select_tokens_from_logits(logits.unsqueeze(0), advantages, 0.5, sampling_mask=mask, drop_zeros=True)
    assert without.mask.tolist() == [[False, True, False, True, False, False]]


# ---- what is refused -------------------------------------------------------------------------------------------------

LOGITS, LABELS = torch.zeros(2, 10), torch.tensor([3, 4])


def of(ids: list[int], offsets: list[int]) -> SamplingMask:
    """A mask whose values are looked at by the op alone."""
    mask = SamplingMask(torch.zeros(len(ids)).int(), torch.zeros(len(offsets)).long())
    mask.token_ids.copy_(torch.tensor(ids))
    mask.offsets.copy_(torch.tensor(offsets))
    return mask


REFUSED = {
    "rows": (of([3], [0, 1]), {}, "sampling_mask: got 1 rows; takes one for each row of the logits, 2"),
    "no token": (of([3, 10, 4], [0, 2, 3]), {}, r"sampling_mask: got id 10 at row 0; takes tokens in \[0, 10\)"),
    "negative": (of([3, 4, -1], [0, 1, 3]), {}, r"sampling_mask: got id -1 at row 1; takes tokens in \[0, 10\)"),
    "twice": (of([3, 5, 4, 5], [0, 1, 4]), {}, "sampling_mask: got id 5 twice at row 1; takes each once"),
    "down": (of([3, 4], [0, 2, 1]), {}, "sampling_mask: its offsets decrease from 2 to 1 at row 1; must not"),
    "too far": (of([3, 4], [0, 1, 3]), {}, "sampling_mask: its offsets end at 3; must end at most at the number"),
    "start": (of([3, 4], [1, 1, 2]), {}, "sampling_mask: its offsets start at 1; must start at 0"),
    "label": (
        of([3, 5], [0, 1, 2]),
        {},
        "labels: got 4 at row 1, which the row's support in sampling_mask lacks; takes",
    ),
    "word": (None, {"label_outside": "keep"}, "label_outside: got 'keep'; takes 'nan' or 'include'"),
    "no mask": (None, {"max_dense_rows": 3}, "max_dense_rows: got 3 without a sampling_mask; takes it with one"),
    "bound": (of([3, 4], [0, 1, 2]), {"max_dense_rows": -1}, "max_dense_rows: got -1; takes at least 0"),
    "no integer": (of([3, 4], [0, 1, 2]), {"max_dense_rows": 1.5}, "max_dense_rows: got 1.5; takes a whole number"),
    "lists": ([[3], [4]], {}, "sampling_mask: got list; takes a SamplingMask or None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    mask, options, said = REFUSED[case]
    with pytest.raises(TypeError if case in ("no integer", "lists") else ValueError, match=said):
        logprob_entropy(LOGITS, LABELS, sampling_mask=mask, **options)  # type: ignore[arg-type]


def test_a_masked_row_may_lack_its_label() -> None:
    mask = SamplingMask.from_lists([[3], [9]])
    logprob, _ = logprob_entropy(LOGITS, LABELS, sampling_mask=mask, mask=torch.tensor([True, False]))
    assert logprob.tolist() == [0, 0]
