"""The same bits from run to run, for any number of threads, alone and in a batch, and for logits of any strides. The
table has the strides of other arguments.
"""

from collections.abc import Callable

import pytest
import torch
from helpers import DTYPES, assert_same_bits, cut, random_labels, random_logits, threads, whole_number_product
from torch import Tensor

from d3s_kernels import (
    compact,
    group_advantages,
    linear_logprob_entropy,
    logprob_entropy,
    max_variance_select,
    select_rollouts,
    select_tokens,
    select_tokens_from_logits,
    topk_mask,
)

Results = tuple[Tensor, ...]


def with_gradient(logits: Tensor, labels: Tensor, cotangents: tuple[Tensor, Tensor], **options: object) -> Results:
    """logprob, entropy, and the gradient of both together."""
    leaf = logits.detach().requires_grad_()
    results = logprob_entropy(leaf, labels, **options)
    return *(result.detach() for result in results), *torch.autograd.grad(results, leaf, cotangents)


def assert_same(some: Results, others: Results) -> None:
    for one, other in zip(some, others, strict=True):
        assert_same_bits(one, other)


# ---- threads and runs ------------------------------------------------------------------------------------------------


def vocabulary_call(rows: int, vocabulary: int, dtype: torch.dtype) -> Callable[[], Results]:
    logits, labels = random_logits(rows, vocabulary, dtype=dtype), random_labels(rows, vocabulary=vocabulary)
    cotangents, temperature = (torch.randn(rows), torch.randn(rows)), 0.5 + torch.rand(rows)
    mask = torch.rand(rows) < 0.8
    return lambda: with_gradient(logits, labels, cotangents, temperature=temperature, mask=mask)


def linear_call() -> Callable[[], Results]:
    hidden, weight = whole_number_product(50, vocabulary=9000)
    labels = random_labels(50, vocabulary=9000)
    return lambda: linear_logprob_entropy(hidden, weight, labels, workspace_bytes=100_000)


def selection_call() -> Callable[[], Results]:
    scores, offsets = torch.randint(1000, (400_000,)) / 64, cut(400_000, 60)
    each, mask = torch.randn(60), torch.rand(400_000) < 0.9
    ragged = {"mask": mask, "offsets": offsets}
    return lambda: (
        topk_mask(scores, 0.1, mask=mask),
        topk_mask(scores, 0.1, **ragged),
        *select_tokens(scores, each, 0.2, **ragged)[:4],
        *select_tokens(scores, each, 0.2, scope="sequence", **ragged)[:4],
        *compact(mask, 300_000),
    )


def logits_selection_call() -> Callable[[], Results]:
    logits, each, mask = random_logits(4, 30, 9000), torch.randn(4), torch.rand(4, 30) < 0.9
    return lambda: select_tokens_from_logits(logits, each, 0.2, mask=mask)[:4]


def rollout_call() -> Callable[[], Results]:
    rewards, offsets = torch.randn(100_000), cut(100_000, 500)
    return lambda: (
        *(group_advantages(rewards, offsets=offsets, scale=scale) for scale in ("group", "batch", "none")),
        max_variance_select(rewards, 16, offsets=offsets),
        select_rollouts(rewards, 16, offsets=offsets),
    )


CALLS = {
    "many rows": lambda: vocabulary_call(300, 1000, torch.float32),
    "few long rows": lambda: vocabulary_call(3, 70_000, torch.bfloat16),
    "one row": lambda: vocabulary_call(1, 100_000, torch.float16),
    "linear": linear_call,
    "selection": selection_call,
    "selection from logits": logits_selection_call,
    "rollouts": rollout_call,
}


@pytest.mark.slow_elsewhere("that torch's own threads do not change what plain PyTorch gives")
@pytest.mark.parametrize("name", CALLS)
def test_threads_and_runs(name: str) -> None:
    call = CALLS[name]()
    with threads(1):
        expected = call()
    for count in (2, 2, 1):
        with threads(count):
            assert_same(call(), expected)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [100, 20_000])
def test_a_row_does_not_see_its_batch(vocabulary: int, dtype: torch.dtype) -> None:
    """This includes numbers of rows on both sides of the one below which threads share a row."""
    logits, labels = random_logits(40, vocabulary, dtype=dtype), random_labels(40, vocabulary=vocabulary)
    cotangents = torch.randn(2, 40)
    whole = with_gradient(logits, labels, tuple(cotangents))
    for size in (1, 3, 15, 16, 17):
        part = slice(5, 5 + size)
        alone = with_gradient(logits[part], labels[part], tuple(cotangents[:, part]))
        assert_same(alone, tuple(result[part] for result in whole))


def test_segments_do_not_see_their_batch() -> None:
    scores = torch.randint(50, (30, 500)) / 8
    whole = (topk_mask(scores, 0.1), group_advantages(scores), max_variance_select(scores, 20))
    for rows in (slice(0, 1), slice(3, 10), slice(29, 30)):
        part = scores[rows]
        alone = (topk_mask(part, 0.1), group_advantages(part), max_variance_select(part, 20))
        assert_same(alone, tuple(result[rows] for result in whole))


@pytest.mark.parametrize("vocabulary", [300, 20_000])
def test_a_row_of_the_head_does_not_see_its_batch(vocabulary: int) -> None:
    hidden, weight = whole_number_product(30, vocabulary=vocabulary)
    labels = random_labels(30, vocabulary=vocabulary)
    whole = linear_logprob_entropy(hidden, weight, labels)
    for part in (slice(0, 1), slice(7, 24)):
        alone = linear_logprob_entropy(hidden[part], weight, labels[part])
        assert_same(alone, tuple(result[part] for result in whole))


# ---- strides ---------------------------------------------------------------------------------------------------------

V = 1001  # odd, so that rows of 16-bit logits start anywhere

LAYOUTS = {
    "shifted by one token": lambda base: base[:, :-1, :V],
    "rows of a padded vocabulary": lambda base: base[..., :V],
    "a later part of the vocabulary": lambda base: base[..., 3 : 3 + V],
    "every other sequence": lambda base: base[::2, :, :V],
    "time first": lambda base: base[..., :V].transpose(0, 1),
    "one sequence expanded": lambda base: base[:1, :, :V].expand(5, -1, -1),
    "one token expanded": lambda base: base[:, :1, :V].expand(-1, 4, -1),
    "four dimensions": lambda base: base[:, :, None, :V].transpose(0, 2).expand(-1, -1, -1, V),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_logits(layout: str, dtype: torch.dtype) -> None:
    logits = LAYOUTS[layout](random_logits(6, 7, V + 10, dtype=dtype))
    rows = logits.shape[:-1]
    labels, mask = random_labels(*rows, vocabulary=V), torch.rand(rows) < 0.8
    cotangents = (torch.randn(rows), torch.randn(rows))
    options = {"temperature": 0.5 + torch.rand(rows), "mask": mask}
    strided = with_gradient(logits, labels, cotangents, **options)
    assert_same(strided, with_gradient(logits.contiguous(), labels, cotangents, **options))
    each = torch.randn(rows)
    some, others = (select_tokens_from_logits(z, each, 0.2, mask=mask) for z in (logits, logits.contiguous()))
    assert_same(some[:4], others[:4])  # a selection without cuts has no weights
