"""Tests of what only the CUDA kernels have: launches that depend on the size, misaligned rows, unchecked values.

test_cuda_emulated.py runs these tests with the plugin tests/emulated_cuda.py; on a GPU, tests/on_cuda.py runs them. The
emulated device is small (D3S_SHIM_SMS, D3S_SHIM_SHARED), so that inputs small enough for a CPU take every path.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import unchecked
from helpers import (
    DTYPES,
    assert_entropy,
    assert_gradient,
    assert_identical,
    assert_logprob,
    assert_same,
    assert_same_bits,
    random_logits,
    ratio_results,
)
from test_sampling_masks import random_spans
from test_sampling_masks_head import Case as HeadCase
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels._lm_head.problem import HeadProblem

OP = torch.ops.d3s_kernels
SLICE = 32768  # kSlice in csrc/cuda/logprob_entropy.cu
SMALL_SHARED = "24576"  # bytes: some 4,000 keys beside the tables of csrc/cuda/topk_mask.cu

pytestmark = pytest.mark.skipif(os.environ.get("D3S_TEST_DEVICE") == "cpu", reason="the CPU's kernels check values")
emulated = pytest.mark.skipif("D3S_EMULATED_LIBRARY" not in os.environ, reason="counted on the emulated device")


@pytest.fixture(autouse=True)
def nobody_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of tensors are not checked, as on a GPU."""
    monkeypatch.delenv("D3S_KERNELS_CHECK", raising=False)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3S_SHIM_SHARED", SMALL_SHARED)


@pytest.fixture(params=["232448", SMALL_SHARED])
def any_shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much shared memory as a GPU has, and so little that long segments are cut into pieces."""
    monkeypatch.setenv("D3S_SHIM_SHARED", request.param)


def at_every_place(rows: Tensor) -> Iterator[Tensor]:
    """Copies of the rows at every alignment. Each copy begins one element further from a multiple of 16 bytes."""
    count, columns = rows.shape
    for shift in range(16 // rows.element_size()):
        room = torch.full((count * columns + shift,), torch.nan, dtype=rows.dtype)
        moved = room[shift:].view(count, columns)
        moved.copy_(rows)
        yield moved


def tensors(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


def gradient(logits: Tensor, labels: Tensor, of: ModuleType = d3s, **options: object) -> Tensor:
    leaf = logits.detach().requires_grad_()
    logprob, entropy = of.logprob_entropy(leaf, labels, **options)
    return torch.autograd.grad(logprob.sum() + 0.5 * entropy.sum(), leaf)[0]


def assert_means(function: str, *arguments: object, **options: object) -> None:
    """The selection is that of the reference."""
    ours, theirs = (tensors(getattr(of, function)(*arguments, **options)) for of in (d3s, reference))
    for mine, exact in zip(ours, theirs, strict=True):
        assert_identical(mine, exact)


def assert_near(found: Iterable[Tensor], logits: Tensor, labels: Tensor, **options: object) -> None:
    """Log-probabilities and entropies are near those of the reference."""
    (logprob, entropy), exact = found, reference.logprob_entropy(logits, labels, **options)  # type: ignore[arg-type]
    assert_logprob(logprob, exact[0])
    assert_entropy(entropy, exact[1])


# ---- threads in any order: equal results -----------------------------------------------------------------------------


class Case(NamedTuple):
    run: Callable[[], object]
    environment: dict[str, str] = {}  # noqa: RUF012


def cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, SLICE + 777, generator=generator).bfloat16()  # many rows, for one multiprocessor
    labels = torch.tensor([5, -100, SLICE + 3, 7, 8, 9])
    scores = torch.randint(0, 50, (9000,), generator=generator).float()
    ragged = torch.tensor([0, 3000, 3000, 3100, 9000])
    rewards = torch.randint(0, 6, (9000,), generator=generator).float()
    small = rewards[:640].view(10, 64)
    uneven = {"offsets": torch.tensor([0, 3, 3, 11, 40, 45, 54, 62, 64]), "max_segment": 8}
    mask = torch.rand(200_001, generator=generator) < 0.3
    moved = rewards + torch.randn(9000, generator=generator)
    groups = torch.randint(-1, 16, (9000,), generator=generator, dtype=torch.int8)
    spans = d3s.SamplingMask.from_lists([[5, 9], [], list(range(SLICE, 99, -9)), [7], [8, 1, 3], [*range(5000)]])
    kept = {"sampling_mask": spans, "label_outside": "include"}
    in_sequences = {"level": "sequence", "offsets": ragged}
    in_groups = {"level": "entropy_group", "groups": groups, "denominator": "old"}
    head, many_scores, two = shared_runs(8), torch.cat([scores] * 5), torch.tensor(2.0)
    few, many = {"D3S_SHIM_SMS": "132"}, {"D3S_SHIM_SMS": "1"}
    tight = {"D3S_SHIM_SHARED": SMALL_SHARED}
    return {
        "logprob_entropy, a block for each row": Case(lambda: d3s.logprob_entropy(logits, labels), many),
        "logprob_entropy, a block for each slice": Case(lambda: d3s.logprob_entropy(logits, labels), few),
        "logprob_entropy_backward": Case(lambda: gradient(logits, labels)),
        "logprob_entropy, a sampling mask": Case(lambda: d3s.logprob_entropy(logits, labels, **kept, max_dense_rows=1)),
        "logprob_entropy_backward, a sampling mask": Case(lambda: gradient(logits, labels, **kept)),
        "linear_logprob_entropy, a sampling mask": Case(lambda: head(max_dense_rows=0)),
        "token_logprobs": Case(lambda: of_ids(logits[:2], EDGES.expand(2, -1), labels[:2])),
        "largest logits": Case(lambda: d3s.topk_logprobs(logits[:2], 40)),
        "largest logits, more ties than fit": Case(lambda: d3s.topk_logprobs(logits[:2].sign(), 40)),
        "topk_mask, one block": Case(lambda: d3s.topk_mask(scores, 0.1)),
        "topk_mask, pieces": Case(lambda: d3s.topk_mask(many_scores, 0.1), tight),
        "topk_mask, ragged": Case(lambda: d3s.topk_mask(scores, 0.1, offsets=ragged)),
        "topk_mask, ragged, beyond shared memory": Case(lambda: d3s.topk_mask(scores, 0.1, offsets=ragged), tight),
        "select_tokens, pieces": Case(lambda: d3s.select_tokens(many_scores, two, 0.5, drop_zeros=True)[:3:2], tight),
        "max_variance_select, groups": Case(lambda: d3s.max_variance_select(small, 16)),
        "max_variance_select, groups longer than said": Case(lambda: d3s.max_variance_select(small[0], 3, **uneven)),
        "max_variance_select, a block": Case(lambda: d3s.max_variance_select(rewards[:4000], 700)),
        "max_variance_select, ragged": Case(lambda: d3s.max_variance_select(rewards, 700, offsets=ragged)),
        "max_variance_select, sorted": Case(lambda: d3s.max_variance_select(rewards, 700)),
        "max_variance_select, sorted, in stretches": Case(lambda: d3s.max_variance_select(moved, 4000)),
        "group_advantages, warps": Case(lambda: d3s.group_advantages(small)),
        "group_advantages, blocks": Case(lambda: d3s.group_advantages(rewards, scale="batch")),
        "group_advantages, equal rewards": Case(lambda: d3s.group_advantages(1 + rewards / 2**24)),
        "compact, one block": Case(lambda: d3s.compact(mask[:9000], 5000)),
        "compact, pieces": Case(lambda: d3s.compact(mask, 70_000)),
        "importance_ratio, sequences": Case(lambda: d3s.importance_ratio(moved, rewards, **in_sequences)),
        "importance_ratio, groups": Case(lambda: d3s.importance_ratio(moved, rewards, **in_groups)),
        "adaptive_clip": Case(lambda: d3s.adaptive_clip(rewards, groups, vocab_size=100, offsets=ragged)),
    }


# Ids at the edges of slices, of words of bits and of vectors; one comes twice.
EDGES = torch.tensor([0, SLICE - 1, SLICE, -1, SLICE + 7, SLICE + 8, 31, 32, SLICE - 1, 33])


def of_ids(logits: Tensor, ids: Tensor, labels: Tensor) -> list[Tensor]:
    """The results of token_logprobs, and the gradient of their sum with different weights."""
    leaf = logits.detach().requires_grad_()
    found = d3s.token_logprobs(leaf, ids, labels)
    weights = torch.linspace(-1, 2, ids.shape[1])
    total = (found.logprobs.where(ids >= 0, 0) * weights).sum() + 2 * found.tail_logprob.sum() - found.entropy.sum()
    return [*(part.detach() for part in found), *torch.autograd.grad(total + found.logprob.sum(), leaf)]


STRETCH = 256  # kStretch in csrc/cuda/support_sums.h


def shared_runs(width: int, dtype: torch.dtype = torch.float32) -> HeadCase:
    """A case in which some spans and some tokens have more places than one block adds up, and others have fewer."""
    pairs = 2 * STRETCH + 5
    lengths = [STRETCH + 1, STRETCH + 1, STRETCH, 2, 2 * STRETCH, *[2] * pairs]
    case = HeadCase(width, 3 * STRETCH, dtype, lengths)
    before, ids = case.mask.token_ids[: -2 * pairs], case.mask.token_ids[-2 * pairs :].view(-1, 2)
    ids[:, 0], ids[:, 1] = 7, 8
    # With the rows before these, token 9 is in one row more than a stretch has.
    ids[int((before == 9).sum()) : STRETCH + 1, 1] = 9
    case.labels[5:] = 7
    return case


def assert_any_order(case: Case, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("D3S_SHIM_SEED", "0")
    first = tensors(case.run())
    for seed in seeds:
        monkeypatch.setenv("D3S_SHIM_SEED", str(seed))
        assert_same(tensors(case.run()), first)


@pytest.mark.parametrize("name", cases())
def test_threads_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_any_order(cases()[name], range(1, 5), monkeypatch)


SELECTIONS = [name for name in cases() if name.startswith(("topk", "select", "max_variance", "compact"))]


@pytest.mark.slow("what depends on a rare order of threads or blocks")
@pytest.mark.parametrize("name", SELECTIONS)
def test_threads_of_selections_in_a_thousand_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_any_order(cases()[name], range(5, 1001), monkeypatch)


# ---- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_entropy_of_one_logit_above_equal_others(dtype: torch.dtype) -> None:
    """In a long sum of equal terms, all rounding errors have the same sign. With one sum for each thread, a GPU was
    1e-5 nats off.
    """
    vocabulary, above = 151_936, torch.tensor([10.625, 11.0, 11.3125, 11.625], dtype=torch.float64)
    logits = torch.zeros(len(above), vocabulary, dtype=dtype)
    logits[:, 77] = above.to(dtype)
    others = (vocabulary - 1) * (-above).exp()
    exact = (1 + others).log() + others * above / (1 + others)
    torch.testing.assert_close(d3s.entropy(logits).double(), exact, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [3, 8, 1021, SLICE + 9])
def test_misaligned_rows(vocabulary: int, dtype: torch.dtype) -> None:
    rows, labels = random_logits(2, vocabulary, dtype=dtype), torch.tensor([vocabulary - 1, 0])
    expected, expected_gradient = d3s.logprob_entropy(rows, labels), gradient(rows, labels)
    assert_entropy(expected[1], reference.entropy(rows.double()))
    for moved in at_every_place(rows):
        assert_same(d3s.logprob_entropy(moved, labels), expected)
        assert_same_bits(gradient(moved, labels), expected_gradient)


@pytest.mark.parametrize("dtype", DTYPES)
# On one multiprocessor, 1 row has a block for each slice, and 6 rows have a block for each row.
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("vocabulary", [1, 1023, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 5])
def test_rows_and_slices_and_tiles_give_the_same_bits(
    vocabulary: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is masked is not read in any of them."""
    logits, labels = random_logits(rows, vocabulary, dtype=dtype), torch.randint(vocabulary, (rows,))
    mask = torch.ones(rows, dtype=torch.bool)
    if rows > 1:
        mask[2], logits[2] = False, torch.nan
    results = []
    for multiprocessors in ("1", "132"):
        monkeypatch.setenv("D3S_SHIM_SMS", multiprocessors)
        results.append(d3s.logprob_entropy(logits, labels, mask=mask))
        for cuts in ([0], [0, SLICE], list(range(0, vocabulary, SLICE))):  # one tile; a slice and the rest; all slices
            state = torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, torch.nan]]).repeat(rows, 1)
            for first, last in itertools.pairwise([*(first for first in cuts if first < vocabulary), vocabulary]):
                OP.softmax_state_(state, logits[:, first:last].contiguous(), labels, first, mask=mask)
            results.append([part.where(mask, 0.0) for part in OP.softmax_state_finish(state)[:2]])
    assert_near(results[0], logits, labels, mask=mask)
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_tiles(dtype: torch.dtype) -> None:
    logits, labels = random_logits(3, SLICE + 777, dtype=dtype), torch.tensor([5, SLICE + 3, -100])
    _, *statistics = OP.logprob_entropy(logits, labels)
    g = torch.tensor([1.0, -0.5, 2.0]), torch.tensor([0.3, 0.0, 1.0])
    whole = OP.logprob_entropy_backward(*g, logits, labels, *statistics)
    for first in (0, SLICE):
        tile, wanted = (part[:, first : first + SLICE].contiguous() for part in (logits, whole))
        OP.logprob_entropy_backward_(*g, tile, labels, *statistics, first)
        assert_same_bits(tile, wanted)


@pytest.mark.parametrize("columns", [1, 4095, 4096, 4097, 8192, 33_000, 151_936])
def test_half_precision_over_its_own_logits(columns: int) -> None:
    """No thread overwrites what another has not read. Between two barriers, the emulated threads run one after the
    other, so without one of the five barriers of the longest row, a result is wrong. Rows begin at multiples of 16
    bytes, or 4 bytes after these.
    """
    labels = torch.tensor([columns - 1, min(columns // 2, 4096)])
    logits, weights = random_logits(2, columns), torch.randn(2, 2)
    _, *statistics = OP.logprob_entropy(logits, labels)
    wide = OP.logprob_entropy_backward(*weights, logits, labels, *statistics)
    for shift, dtype in ((0, torch.bfloat16), (1, torch.float16)):
        room = torch.full((2, columns + 8 - columns % 4), torch.nan)[:, shift : shift + columns].copy_(logits)
        OP.logprob_entropy_backward_(*weights, room, labels, *statistics, grad_dtype=dtype)
        assert_same_bits(room.view(dtype)[:, :columns], wide.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_ids_in_slices_and_tiles_and_misaligned_rows(dtype: torch.dtype) -> None:
    logits, labels = random_logits(2, SLICE + 9, dtype=dtype), torch.tensor([SLICE + 7, -100])
    logits[1, SLICE] += 20  # a given id with nearly all of the probability
    ids = EDGES.expand(2, -1).contiguous()
    expected = of_ids(logits, ids, labels)
    exact = reference.token_logprobs(logits, ids, labels)
    for found, of_reference in zip(expected, exact, strict=False):
        torch.testing.assert_close(found.double(), of_reference, rtol=1e-6, atol=1e-5)
    for moved in itertools.islice(at_every_place(logits), 1, None, 3):
        assert_same(d3s.token_logprobs(moved, ids, labels), expected[:4])
    state = torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, torch.nan]]).repeat(2, 1)
    taken = torch.full(ids.shape, torch.nan)
    for first in (0, SLICE):
        tile = logits[:, first : first + SLICE].contiguous()
        OP.token_softmax_state_(state, taken, tile, labels, ids, first)
    assert_same(OP.token_logprobs_finish(state, taken, ids)[:2], expected[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_slices_and_tiles_and_misaligned_rows(dtype: torch.dtype) -> None:
    logits = random_logits(2, SLICE + 1000, dtype=dtype)
    logits[1] = logits[1].sign()  # more ties than candidates fit
    expected = d3s.topk_logprobs(logits, 90)
    for found, of_reference in zip(expected, reference.topk_logprobs(logits, 90), strict=True):
        torch.testing.assert_close(found.double(), of_reference.double(), rtol=1e-6, atol=1e-5)
    for moved in itertools.islice(at_every_place(logits), 1, None, 3):
        assert_same(d3s.topk_logprobs(moved, 90), expected)
    for edges in ((0, SLICE + 1000), (0, SLICE, SLICE + 1000)):
        state = torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, torch.nan]]).repeat(2, 1)
        best = torch.full((2, 90), torch.iinfo(torch.int64).min)
        for first, last in itertools.pairwise(edges):
            OP.topk_softmax_state_(state, best, logits[:, first:last].contiguous(), first)
        if len(edges) == 2:
            whole = state, best
        assert_same((state, best), whole)


# ---- selections: both sides of every threshold -----------------------------------------------------------------------

LENGTHS = (0, 1, 31, 32, 33, 510, 512, 513, 1022, 1024, 1025, 2048, 2049, 4096, 4097, 8190, 8192, 8193)
LENGTHS += (16384, 16385, 40_000)


@pytest.mark.usefixtures("any_shared")
@pytest.mark.parametrize("length", LENGTHS)
def test_topk_of_any_length(length: int) -> None:
    for scores in (torch.randn(2, length), torch.randint(0, 4, (2, length)).float()):
        assert_means("topk_mask", scores, 0.2)
        assert_means("select_tokens", scores, torch.tensor([1.0, -2.0]), 0.2, scope="sequence", drop_zeros=True)


@pytest.mark.usefixtures("any_shared")
@pytest.mark.parametrize("max_segment", [None, 1, 5000, 20_000])
def test_topk_of_segments_longer_than_said(max_segment: int | None) -> None:
    """max_segment is a hint. The result is right even if the hint is wrong."""
    offsets = torch.tensor([0, 0, 10, 2058, 4107, 24_000, 30_000])
    assert_means("topk_mask", torch.randint(0, 100, (30_000,)).float(), 0.1, offsets=offsets, max_segment=max_segment)


@pytest.mark.usefixtures("any_shared")
@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_of_misaligned_scores(dtype: torch.dtype) -> None:
    """Four scores are loaded as a vector only if the scores, the advantages and the mask are all aligned there."""
    offsets = torch.tensor([0, 0, 1, 6, 2050, 6151, 11_000])
    for skip, kept in ((0, 1), (1, 0), (2, 3), (4, 1)):
        scores = torch.randn(11_004).to(dtype)[skip : skip + 11_000]
        scores[::7], scores[3::11] = 0, torch.nan
        mask, each = (torch.rand(11_004) < 0.8)[kept:][:11_000], torch.randn(11_004)[kept:][:11_000]
        assert_means("topk_mask", scores, 0.2, mask=mask)
        assert_means("topk_mask", scores, 0.2, mask=mask, offsets=offsets)
        assert_means("select_tokens", scores, each, 0.3, offsets=offsets, drop_zeros=True)


# Odd lengths, since rows at different addresses then begin at different places of a vector. The longest one for each
# number of warps, and 512, at which aligned rows just fit.
HELD = [(length, torch.float32) for length in (20, 509, 512, 1021, 2045, 4093, 8189)]
HELD += [(1021, torch.bfloat16), (8189, torch.bfloat16), (2045, torch.float16)]


@pytest.mark.parametrize(("length", "dtype"), HELD)
def test_topk_of_segments_in_registers(length: int, dtype: torch.dtype) -> None:
    """With NaN, padding, both zeros, ties that are not all kept, and keys that differ in the last digit alone. With
    few warps, -inf, whose key is the lowest, is counted in the same bin as what is absent.
    """
    near = torch.arange(length).float() * 2**-23 + 1  # bfloat16 and float16 round these to a few values
    rows = [torch.randn(length), near, torch.randint(-2, 3, (length,)).float(), torch.full((length,), torch.nan)]
    rows.append(-1e38 * torch.randn(length).abs())
    rows[4][::2], rows[4][1::6] = -torch.inf, torch.nan
    for skip in (0, 1, 2):
        room = torch.zeros(len(rows) * length + skip, dtype=dtype)
        scores = room[skip:].view(len(rows), length)
        scores.copy_(torch.stack(rows))
        scores[0, ::7], scores[0, 1::7], scores[0, 3::11], scores[:, 5] = 0, -0.0, torch.nan, torch.inf
        scores[0, 9], scores[2, -1] = -torch.inf, torch.nan
        mask = (torch.rand(len(room)) < 0.8)[skip:].view(len(rows), length)
        mask[1:, length * 2 // 3 :] = False
        for ratio, present in itertools.product((1e-4, 0.1, 0.9), (None, mask)):
            assert_means("topk_mask", scores, ratio, mask=present)
            for drop_zeros in (False, True):
                given = {"scope": "sequence", "drop_zeros": drop_zeros, "mask": present}
                assert_means("select_tokens", scores, torch.tensor([1.0, -3.0, 0.5, 2.0, 1.5]), ratio, **given)


@pytest.mark.usefixtures("tight")
def test_topk_of_a_few_long_segments_among_short_ones() -> None:
    """There is no max_segment. Blocks take short segments, and pieces take long ones, two of which share a piece."""
    lengths = [3] * 60 + [8000, 0, 4100] + [5] * 40 + [4001, 1, 5000]
    total, offsets, each = sum(lengths), torch.tensor([0, *lengths]).cumsum(0), torch.randn(len(lengths))
    each[0] = 0
    for entropy in (torch.rand(total), torch.randint(0, 3, (total,)).float()):
        assert_means("topk_mask", entropy, 0.3, offsets=offsets)
        for scope in ("sequence", "batch"):
            assert_means("select_tokens", entropy, each, 0.3, offsets=offsets, scope=scope, drop_zeros=True)


@emulated
@pytest.mark.parametrize(("rows", "reads"), [(2, 1), (1, 2)])  # two rows take a block each; one row is cut into pieces
def test_how_often_scores_are_read(rows: int, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are the worst case: all digits are needed to find the k-th score."""
    monkeypatch.setenv("D3S_SHIM_SHARED", "50000")  # some 10,000 scores
    scores = torch.arange(1.0, 16_385.0).view(rows, -1)
    assert asked(lambda: d3s.topk_mask(scores, 0.2)).scores == reads * scores.numel()


@pytest.mark.parametrize("length", [1, 2, 31, 127, 128, 129, 512, 513, 1024, 1025, 2049, 4095, 4096, 4097, 9001])
def test_max_variance_of_any_length(length: int) -> None:
    # With equal values all splits tie, and the rule takes the split with no value from the top. In a round, a block
    # tries four splits for each of its 128, 256 or 512 threads.
    threads = [keep for keep in (32, 128, 512, 513, 2048, 2049, 4097) if keep < length]
    for values in (torch.randn(3, length), torch.randint(0, 3, (3, length)).float(), torch.zeros(1, length)):
        for keep in {1, 2, *threads, length // 3 + 1, length}:
            assert_means("max_variance_select", values, keep)


@pytest.mark.parametrize("length", [65_536, 65_537])
def test_pools_of_both_sorts(length: int) -> None:
    """The longest pool that our kernels sort, and a pool that CUB sorts. With few values, the order of ties matters."""
    assert_means("max_variance_select", torch.randint(0, 50, (length,)).float(), 1000)


# Group lengths around the number of values that 2, 4, 8, 16 and 32 lanes hold.
GROUPS = (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129)


def hard_rewards(*shape: int) -> tuple[Tensor, Tensor]:
    """Rewards and a mask. Rows have few different values, equal values, both zeros, any sizes, NaN or infinities."""
    size = torch.tensor([1.0, 3e38, 1e-45])[torch.randint(3, shape[:1])][:, None]
    values = torch.randint(-1, 2, shape) * size
    values[::5] = torch.randn(shape)[::5]
    values[1::5] = 0.7
    values[2::5, ::3] = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(3, (1,))]
    return values, torch.rand(shape) < torch.tensor([0.0, 0.5, 1.0, 1.0])[torch.randint(4, shape[:1])][:, None]


@pytest.mark.parametrize("length", GROUPS)
def test_groups_in_the_lanes_of_a_warp(length: int) -> None:
    """The groups of a warp differ in the number of usable values. The last warp has lanes without a group."""
    values, mask = hard_rewards(19, length)
    for keep in {1, 2, length // 2 + 1, max(length - 1, 1), 2 * length}:
        assert_means("max_variance_select", values, keep)
    for half in (values.half(), values.bfloat16()):
        assert_means("max_variance_select", half, torch.tensor(3), mask=mask)
    assert not d3s.max_variance_select(values, torch.tensor(0)).any()


@pytest.mark.parametrize("said", [2, 8, 16, 32, 64, 128, None])
def test_groups_of_any_lengths_in_a_warp(said: int | None) -> None:
    """Some groups are longer than the call says. A warp sorts these outside of its registers."""
    lengths = torch.randint((said or 130) + 1, (24,))
    lengths[torch.tensor([4, 5, 17])] += torch.tensor([1, 40, 150])
    lengths[-1] = 0
    offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    values, mask = (flat.flatten() for flat in hard_rewards(1, int(offsets[-1])))
    values = values.where(torch.rand(len(values)) < 0.9, torch.nan)
    for given in (None, mask):
        for keep in (1, 5, 16):
            assert_means("max_variance_select", values, keep, offsets=offsets, max_segment=said, mask=given)


ROUND = 1024  # kRound in csrc/cuda/max_variance_stretches.h


@pytest.mark.parametrize("keep", [2, ROUND - 1, ROUND, ROUND + 1, 2 * ROUND, 3 * ROUND + 1, 4999, 5000])
def test_max_variance_in_stretches(keep: int) -> None:
    """Several long segments begin at or beside a multiple of a round. Short and empty segments are between them."""
    lengths = torch.tensor([0, 1, ROUND - 1, 5000, 0, 7, 4 * ROUND + 1, 3 * ROUND, *[1] * 50, 2, 5000, ROUND + 1, 0])
    offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    total = int(offsets[-1])
    mask = torch.rand(total) < 0.9
    for values in (torch.randn(total), torch.randint(0, 2, (total,)).float(), torch.rand(total).bfloat16() + 1000):
        for given in (None, mask, torch.zeros_like(mask)):
            assert_means("max_variance_select", values, keep, offsets=offsets, max_segment=5000, mask=given)


@pytest.mark.parametrize(
    ("cuts", "keep", "said"),
    [
        *(([0, 50, 100], 7, said) for said in (None, 0, 1, 30, 49)),
        *(([0, 100, 100, 228, 357, 3000, 9000, 12_000], 40, said) for said in (None, 1, 100, 3000, 8000)),
    ],
)
def test_max_variance_of_segments_longer_than_said(cuts: list[int], keep: int, said: int | None) -> None:
    values = torch.randint(0, 9, (cuts[-1],)).float()
    assert_means("max_variance_select", values, keep, offsets=torch.tensor(cuts), max_segment=said)


@pytest.mark.slow_elsewhere("more blocks than a dimension of a grid can have")
def test_more_segments_than_a_grid_is_wide() -> None:
    values = torch.randint(0, 3, (70_001, 4)).float()
    offsets = torch.arange(70_002) * 4
    kept = d3s.max_variance_select(values, 2)
    assert kept.sum(1).eq(2).all()
    assert_identical(d3s.max_variance_select(values.flatten(), 2, offsets=offsets), kept.flatten())
    top = d3s.topk_mask(values, k=1)
    assert_identical(top, torch.nn.functional.one_hot(values.argmax(1), 4).bool())
    expected = (values - values.mean(1, keepdim=True)) / (values.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(d3s.group_advantages(values), expected, atol=1e-5, rtol=1e-5)


STEP, MOST_PIECES = 16_384, 512  # kStep and kMostPieces in csrc/cuda/compact.cu


def assert_compact(values: Tensor, capacity: int) -> None:
    """Compares the results for a mask whose true values may be any byte except 0."""
    found, expected = d3s.compact(values.view(torch.bool), capacity), reference.compact(values != 0, capacity)
    for ours, exact in zip(found, expected, strict=True):
        assert_identical(ours, exact)


@pytest.mark.parametrize("n", [0, 1, 15, STEP - 1, STEP, STEP + 1, 5 * STEP + 77])
def test_compact_of_any_length(n: int) -> None:
    """Some capacities are near the total. One is so large that there are more blocks to fill the rest than to count."""
    values = (torch.rand(n) < 0.2).byte()
    total = int(values.sum())
    for capacity in {0, max(total - 1, 0), total, total + 1, n, n + 3 * STEP}:
        assert_compact(values, capacity)


@pytest.mark.parametrize("n", [5, STEP - 8])
def test_compact_at_every_address(n: int) -> None:
    """The address decides whether there are one or two launches. A read outside of the mask would find true values."""
    room = torch.full((n + 32,), 255, dtype=torch.uint8)
    values = torch.randint(0, 256, (n,)) * (torch.rand(n) < 0.3)
    for shift in range(16):
        mask = room[shift : shift + n]
        mask.copy_(values)
        assert_compact(mask, n)
        mask.fill_(255)


@pytest.mark.parametrize("n", [MOST_PIECES * STEP, MOST_PIECES * STEP + 1])
def test_compact_of_so_many_values_that_a_piece_has_two_steps(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3S_SHIM_SEED", "1")  # warps overtake each other
    values = torch.zeros(n, dtype=torch.uint8)
    values[torch.randint(0, n, (5000,))] = 1
    values[-1] = 1
    assert_compact(values, 6000)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("length", [40_000, 100])
def test_nothing_to_select(length: int) -> None:
    """Nothing is selected if no score counts, or if the ratio, k or keep is bad, in pieces and in one block."""
    scores = torch.rand(2, length)
    for given in (
        d3s.topk_mask(scores, 0.5, mask=torch.zeros(2, length, dtype=torch.bool)),
        d3s.topk_mask(torch.full((2, length), torch.nan), 0.5),
        d3s.topk_mask(scores, torch.tensor(-1.0)),
        d3s.topk_mask(scores, k=torch.tensor(0)),
        d3s.max_variance_select(torch.rand(5, 9), torch.tensor(0)),
        d3s.max_variance_select(torch.rand(5, 9000), torch.tensor(-1)),
    ):
        assert not given.any()
    for ratio in (0.0, -1.0, 1.5, torch.nan):
        kept = d3s.select_tokens(scores, torch.tensor(1.0), torch.tensor(ratio))
        assert (kept.mask.any().item(), kept.count.item(), kept.threshold.item()) == (False, 0, torch.inf), ratio


@pytest.mark.parametrize("length", [100, 700, 5000])
def test_one_value_of_any_size(length: int) -> None:
    assert_means("max_variance_select", torch.randn(20, length) * 10.0 ** torch.randint(-15, 15, (20, length)), 1)


# ---- values that nobody checked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", unchecked.ALL)
def test_values_that_nobody_checked(check: Callable[..., None]) -> None:
    check(lambda name, *arguments, **options: getattr(OP, name)(*arguments, **options))


def test_spans_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not check the values of spans, as on a GPU."""
    monkeypatch.setattr(HeadProblem, "_check_supports", lambda problem: None)
    spans = [[3, 4], [-1], [50, 3], [7, 2**31 - 1], [5, 6], [5], [8], [1, 2, 9]]
    labels = torch.tensor([3, 3, 3, 7, 9, 9, -100, 2])
    ids = torch.tensor([*itertools.chain(*spans)], dtype=torch.int32)
    offsets = torch.tensor([0, *map(len, spans)]).cumsum(0)
    hidden, weight, ones = torch.randn(8, 16), torch.randn(50, 16), torch.ones(8)

    def undefined(cuts: Tensor, include: bool, bound: int | None) -> list[list[bool]]:
        arguments, options = (hidden, weight, labels), {"include_label": include, "max_dense_rows": bound}
        options |= {"support_ids": ids, "support_offsets": cuts}
        found = OP.linear_logprob_entropy(*arguments, **options)
        slopes = OP.linear_logprob_entropy_backward(ones, ones, *found[1:], [True, True, False], *arguments, **options)
        return [part.isnan().tolist() for part in (*found[:2], slopes[0].sum(1))]

    bad = [False, True, True, True, False, False, False, False]
    assert undefined(offsets, True, 0) == [bad, bad, bad]
    lacking = [is_bad or row in (4, 5) for row, is_bad in enumerate(bad)]
    assert undefined(offsets, False, None) == [lacking, bad, lacking]
    for cuts in (-torch.arange(9), 1000 * torch.arange(9), torch.full((9,), -(2**62)), torch.arange(9, 0, -1)):
        assert all(all(part[:6]) for part in undefined(cuts, True, None))


@pytest.mark.parametrize("longest", [1023, 1024, 1025, 3000])
def test_long_spans_beside_short_ones(longest: int) -> None:
    """A span above 1,024 tokens takes a whole block. Each of the two blocks has spans of both kinds."""
    lengths = [1, longest, 2, 40, 0, longest, 3, 1, longest, 5, longest]
    spans = [torch.randperm(3100)[:length].tolist() for length in lengths]
    labels = torch.tensor([span[-1] if span else 7 for span in spans])
    mask = d3s.SamplingMask.from_lists(spans)
    logits, rows = random_logits(11, 3100), torch.tensor([10, 5, 0, 8])
    found = d3s.logprob_entropy(logits, labels, sampling_mask=mask)
    assert_near(found, logits, labels, sampling_mask=mask)
    slopes = (gradient(of, labels, by, sampling_mask=mask) for of, by in ((logits, d3s), (logits.double(), reference)))
    assert_gradient(*slopes)
    some = d3s.logprob_entropy(logits[rows], labels[rows], sampling_mask=mask.index_select(rows))
    assert_same(some, (all_rows[rows] for all_rows in found))


def test_a_bound_counts_the_dense_rows_of_all_threads() -> None:
    lengths = torch.randint(2, (3000,)).index_fill_(0, torch.arange(100), 1)
    offsets, ids = torch.tensor([0, *itertools.accumulate(lengths.tolist())]), torch.zeros(3000, dtype=torch.int32)
    count = int((lengths == 0).sum())
    for bound in (count, count - 1, None):
        dense, exceeded = OP.support_rows(torch.empty(3000, 1), ids, offsets, bound)
        assert torch.equal(dense, lengths == 0)
        assert exceeded.tolist() == [bound == count - 1]


# With the last two lists of offsets, some stretches of the first row belong to no row.
@pytest.mark.parametrize("cuts", [[2**31 - 1, 4000, 935, 3000], [0, 3000, -5, 335], [-5, 4000, -5, 0]])
def test_bad_offsets_of_shared_sums_give_what_is_undefined(cuts: list[int]) -> None:
    """An undefined row is NaN. The other rows have no gradient, so they are 0: no sum is read that was not written."""
    rows, weight = torch.full((3003,), -1, dtype=torch.int32), torch.randn(9, 8)
    undefined = torch.tensor([False, True, False])
    for kind in (torch.int32, torch.int64):
        out = torch.zeros(3, 8)
        offsets = torch.tensor(cuts).to(kind)
        OP.support_hidden_grad_(torch.ones(3003), weight, rows, rows.abs(), offsets, undefined, out)
        assert out[1].isnan().all()
        assert not out[[0, 2]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_blocks_share(dtype: torch.dtype) -> None:
    """The results are near those in float64. A row's results are bitwise equal wherever its span begins."""
    case, rows = shared_runs(16, dtype), [4, 9, 0, 2, 1]
    found, exact = case(max_dense_rows=0), case.exact()
    assert_logprob(found[0], exact[0])
    assert_entropy(found[1], exact[1])
    for ours, theirs in zip(found[2:], exact[2:], strict=True):
        assert_gradient(ours, theirs, floor=1e-4)
    assert_same(case.of(rows)(max_dense_rows=0)[:3], (whole[rows] for whole in found[:3]))


SHORT = 16  # kShort in csrc/cuda/support_weight_grad.h: the longest run that a warp adds up
RUNS = (1, SHORT - 1, SHORT, SHORT + 1, 2 * SHORT, 33, STRETCH, STRETCH + 1, STRETCH + SHORT, 2 * STRETCH + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 24, 1100])
def test_runs_of_every_length_at_every_place(width: int, dtype: torch.dtype) -> None:
    """The results are near those in float64. They are bitwise equal wherever a run begins among the sorted places."""
    lengths = RUNS if width == 24 else (1, SHORT, SHORT + 1, 33)
    hidden, added = torch.randn(40, width).to(dtype), torch.randn(len(lengths) + 1, width)
    first: dict[torch.dtype, Tensor] = {}
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for before in (0, *torch.randperm(SHORT)[:3].add(1).tolist()):
        tokens = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([before, *lengths]))
        number = torch.arange(len(tokens)) - before
        rows, grad = number % 40, number.add(1.0).sin()
        order = torch.rand(len(tokens)).argsort()
        order[tokens[order].argsort(stable=True)] = torch.arange(len(tokens))  # keeps the order of each token's places
        exact = torch.zeros(len(added), width + 1).double()
        exact.index_add_(0, tokens, torch.cat([hidden, torch.ones(40, 1)], 1).double()[rows] * grad.unsqueeze(1))
        for kind in {dtype, torch.float32}:
            out, bias = added.clone().to(kind), torch.zeros(len(added), dtype=dtype)
            OP.support_weight_grad_(grad[order], hidden, rows[order].int(), tokens[order].int(), out, bias)
            found = torch.cat([out.float(), bias.unsqueeze(1)], 1)[1:]
            expected = exact + torch.nn.functional.pad(added.to(kind), (0, 1))
            torch.testing.assert_close(found.double(), expected[1:], atol=tolerance, rtol=tolerance / 2)
            assert_same_bits(found, first.setdefault(kind, found))


class Counts(ctypes.Structure):
    """The counts of the emulated device's work, as in shim::Counts."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("launches", "memsets", "vectors", "scores")]


class Asked(NamedTuple):
    launches: int
    memsets: int
    bytes: int  # read by loads of 16 bytes
    scores: int  # read by top-K selection


def asked(call: Callable[[], object]) -> Asked:
    counts = Counts.in_dll(ctypes.CDLL(os.environ["D3S_EMULATED_LIBRARY"]), "d3s_shim_counts")
    before = Counts.from_buffer_copy(counts)
    call()
    launches, memsets, vectors, scores = (getattr(counts, of) - getattr(before, of) for of, _ in Counts._fields_)
    return Asked(launches, memsets, 16 * vectors, scores)


@emulated
def test_launches_and_bytes_of_the_head() -> None:
    """In the forward, each pair of a row and a kept token reads the row's hidden state and the token's weight row. The
    backward reads both again, and then one of the two for each gradient. Rows of the weight's gradient that change are
    read once.
    """
    case = HeadCase(64, 999, torch.bfloat16, lengths=[1, 5, 2, 190, 40, 1, 3])
    pairs, row = sum((5, 2, 190, 40, 3)), 2 * 64
    leaves, into = case.head.requiring_grad(), torch.zeros(999, 64)

    def forward() -> tuple[Tensor, Tensor]:
        given = {"sampling_mask": case.mask, "max_dense_rows": 0, "weight_grad_into": into}
        return leaves(d3s.linear_logprob_entropy, case.labels, **given)

    assert asked(forward)[:3] == (4, 0, 2 * pairs * row)
    results = forward()
    found = asked(lambda: torch.autograd.grad(results, [leaves.hidden, leaves.bias], case.cotangents))
    assert found[:3] == (11, 3, 4 * pairs * row + 4 * 64 * int(case.touched().sum()))


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_and_bytes_of_the_largest_logits(dtype: torch.dtype) -> None:
    """Each logit is read twice, the second time from the caches: a slice is smaller than they are."""
    logits = random_logits(3, 2 * SLICE, dtype=dtype)
    found = asked(lambda: d3s.topk_logprobs(logits, 64))
    assert found[:3] == (4, 0, 2 * logits.numel() * logits.element_size())


@emulated
@pytest.mark.parametrize("lengths", [[3, 1, 2], [3, 0, 2]], ids=["all rows have a support", "one row has none"])
def test_launches_over_supports(lengths: list[int]) -> None:
    """One marks the dense rows, one computes these rows, and one the others; without dense rows there is one less."""
    mask, labels = random_spans(lengths, 64)
    logits = random_logits(3, 64).requires_grad_()
    given = {"sampling_mask": mask}

    def counts(**options: int) -> list[tuple[int, int]]:
        results: list[Tensor] = []
        forward = asked(lambda: results.extend(d3s.logprob_entropy(logits, labels, **given, **options)))
        backward = asked(lambda: torch.autograd.grad(results, logits, [torch.ones(3)] * 2))
        return [each[:2] for each in (forward, backward)]

    assert counts() == counts(max_dense_rows=2) == [(3, 0), (2, 0)]
    if 0 not in lengths:
        assert counts(max_dense_rows=0) == [(2, 0), (2, 0)]


@emulated
@pytest.mark.parametrize(("n", "launches"), [(STEP, 1), (STEP + 1, 2), (20 * STEP + 17, 2)])
def test_launches_and_bytes_of_compact(n: int, launches: int) -> None:
    """Every byte is read once, since no block reads more than its own piece."""
    mask = torch.rand(n) < 0.1
    assert asked(lambda: d3s.compact(mask, n // 8))[:3] == (launches, 0, n // 16 * 16)


BAD_OFFSETS = [[0, 10, 5, 20], [5, 20], [0, 7], [0, 40], [-9, 20], [0, 2**31 - 1, 20], [20, 0], [7], [20]]


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("offsets", BAD_OFFSETS)
def test_bad_offsets_stay_within_bounds(offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    values, cuts, each = torch.randn(20), torch.tensor(offsets), torch.ones(len(offsets) - 1)
    results = [
        d3s.topk_mask(values, 0.5, offsets=cuts),
        d3s.topk_mask(torch.randn(9000), 0.5, offsets=cuts * 450, max_segment=8000),
        d3s.topk_mask(torch.rand(9000), 0.1, offsets=torch.tensor([0, 7000, 5000, 4000, 8500, 8500])),
        d3s.max_variance_select(values, 2, offsets=cuts),
        d3s.max_variance_select(torch.randn(9000), 2, offsets=cuts * 450, max_segment=8000),
        d3s.max_variance_select(torch.randn(9000), 3000, offsets=cuts * 450, max_segment=8000),
        *(
            d3s.select_rollouts(values, 1, rule=rule, offsets=cuts, scope=scope)
            for rule in ("max_variance", "highest", "percentile")
            for scope in ("batch", "group")
        ),
        *d3s.select_tokens(values, each, 0.5, offsets=cuts, scope="sequence")[:4],
        d3s.select_tokens(values, each, 0.5, offsets=cuts).mask,
        d3s.group_advantages(values, offsets=cuts),
        d3s.importance_ratio(values, values, level="sequence", offsets=cuts),
        d3s.adaptive_clip(values, torch.zeros(20, dtype=torch.int8), vocab_size=9, offsets=cuts),
        d3s.entropy_groups(values, offsets=cuts),
    ]
    for result in results:
        if result.dtype == torch.bool:  # shows that every byte was written
            assert ((result.view(torch.uint8) == 0) | (result.view(torch.uint8) == 1)).all()
    monkeypatch.setenv("D3S_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="offsets: "):
        d3s.topk_mask(values, 0.5, offsets=cuts)


@pytest.mark.skipif("D3S_RATIOS_OF_CPU" not in os.environ, reason="needs the results of the CPU's kernels")
def test_ratios_have_the_bits_of_the_cpu() -> None:
    """Sums are of integers, and exp uses only additions and multiplications, so all devices give the same bits."""
    assert_same(ratio_results(), torch.load(os.environ["D3S_RATIOS_OF_CPU"]))


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("length", [1, 6, 1023, 7170, 16_385])
def test_ratios_of_rows_and_of_ragged_sequences_have_the_same_bits(length: int, shift: int) -> None:
    """A block handles a row unless it is long. A warp handles 1,024 ragged tokens, in vectors if they are aligned."""
    old, logprob = torch.rand(2, shift + 3 * length)[:, shift:].unbind()
    groups = torch.randint(-1, 11, (shift + 3 * length,), dtype=torch.int8)[shift:]
    mask, cuts = torch.rand(shift + 3 * length)[shift:] < 0.7, torch.arange(4) * length
    rows = [values.view(3, length) for values in (logprob, old, mask)]
    for denominator in ("self", "old"):
        for ids, level in ((None, "sequence"), (groups, "entropy_group")):
            given = {"level": level, "denominator": denominator}
            ragged = d3s.importance_ratio(logprob, old, mask, groups=ids, offsets=cuts, **given)
            of_rows = d3s.importance_ratio(*rows, groups=None if ids is None else ids.view(3, length), **given)
            assert_same_bits(ragged, of_rows.flatten())


@emulated  # which then runs no block
def test_more_empty_rows_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is no int; a launch for fewer rows would leave counts and thresholds unwritten."""
    monkeypatch.setenv("D3S_SHIM_DRY", "1")
    with pytest.raises(RuntimeError, match="d3s_kernels: topk_mask: too many blocks"):
        d3s.topk_mask(torch.empty(2**31, 0), 0.5)


@emulated  # a GPU's shared memory is what it is
def test_the_launch_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3S_SHIM_SHARED", "1")
    with pytest.raises(RuntimeError, match="d3s_kernels: topk_mask"):
        d3s.topk_mask(torch.randn(9), 0.5)


@pytest.mark.parametrize("offsets", [[5, 20], [0, 7]])
def test_what_bad_offsets_leave_out_is_nan(offsets: list[int]) -> None:
    for _ in range(3):  # so that results are in memory that was used before
        torch.ones(20)
    values, cuts = torch.randn(20), torch.tensor(offsets)
    inside = torch.zeros(20, dtype=torch.bool)
    inside[offsets[0] : offsets[1]] = True
    for result in (
        d3s.group_advantages(values, offsets=cuts),
        d3s.importance_ratio(values, torch.zeros(20), level="sequence", offsets=cuts),
    ):
        assert result.isnan().tolist() == (~inside).tolist()
