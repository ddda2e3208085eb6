"""What only the CUDA kernels have: several launches for several sizes, rows that lie askew, values that nobody checked.

Run by test_cuda_emulated.py, with the plugin tests/emulated_cuda.py, and on a GPU by cuda/test_suites.py. The emulated
device is small (D3S_SHIM_SMS, D3S_SHIM_SHARED), so that every path is taken by inputs that a CPU gets through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from helpers import (
    DTYPES,
    assert_entropy,
    assert_gradient,
    assert_identical,
    assert_logprob,
    assert_same_bits,
    cut,
    random_labels,
    random_logits,
)
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference

SLICE = 32768  # kSlice in csrc/cuda/logprob_entropy.cu
SEEDS = range(1, 9)
SMALL_SHARED = "24576"  # bytes: some 4,000 keys beside the tables of csrc/cuda/topk_mask.cu


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: values of tensors are not looked at."""
    monkeypatch.delenv("D3S_KERNELS_CHECK", raising=False)


@pytest.fixture
def many_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, for such a device: each slice of a row gets a block."""
    monkeypatch.setenv("D3S_SHIM_SMS", "132")


@pytest.fixture
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows, for such a device: each gets a block."""
    monkeypatch.setenv("D3S_SHIM_SMS", "1")


def at_every_place(rows: Tensor) -> Iterator[Tensor]:
    """The same rows, each time starting one element further from a multiple of 16 bytes."""
    count, columns = rows.shape
    for shift in range(16 // rows.element_size()):
        room = torch.full((count * columns + shift,), torch.nan, dtype=rows.dtype)
        moved = room[shift:].view(count, columns)
        moved.copy_(rows)
        yield moved


# ---- threads in any order: the same bits -----------------------------------------------------------------------------


class Case(NamedTuple):
    run: Callable[[], object]
    environment: dict[str, str] = {}  # noqa: RUF012


def gradient(logits: Tensor, labels: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    logprob, entropy = d3s.logprob_entropy(leaf, labels)
    return torch.autograd.grad(logprob.sum() + 0.5 * entropy.sum(), leaf)[0]


def cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, SLICE + 777, generator=generator).bfloat16()
    labels = torch.tensor([5, -100, SLICE + 3])
    scores = torch.randint(0, 50, (9000,), generator=generator).float()
    ragged = torch.tensor([0, 3000, 3000, 3100, 9000])
    rewards = torch.randint(0, 6, (9000,), generator=generator).float()
    small = rewards[:640].view(10, 64)
    mask = torch.rand(200_001, generator=generator) < 0.3
    few, many = {"D3S_SHIM_SMS": "132"}, {"D3S_SHIM_SMS": "1"}
    tight = {"D3S_SHIM_SHARED": SMALL_SHARED}
    return {
        "logprob_entropy, a block for each row": Case(lambda: d3s.logprob_entropy(logits, labels), many),
        "logprob_entropy, a block for each slice": Case(lambda: d3s.logprob_entropy(logits, labels), few),
        "logprob_entropy_backward": Case(lambda: gradient(logits, labels)),
        "topk_mask, one block": Case(lambda: d3s.topk_mask(scores, 0.1)),
        "topk_mask, pieces": Case(lambda: d3s.topk_mask(torch.cat([scores] * 5), 0.1), tight),
        "topk_mask, ragged": Case(lambda: d3s.topk_mask(scores, 0.1, offsets=ragged)),
        "topk_mask, ragged, beyond shared memory": Case(lambda: d3s.topk_mask(scores, 0.1, offsets=ragged), tight),
        "select_tokens, pieces": Case(
            lambda: d3s.select_tokens(torch.cat([scores] * 5), torch.tensor(2.0), 0.5, drop_zeros=True)[::2], tight
        ),
        "max_variance_select, warps": Case(lambda: d3s.max_variance_select(small, 16)),
        "max_variance_select, a block": Case(lambda: d3s.max_variance_select(rewards[:4000], 700)),
        "max_variance_select, ragged": Case(lambda: d3s.max_variance_select(rewards, 700, offsets=ragged)),
        "max_variance_select, sorted": Case(lambda: d3s.max_variance_select(rewards, 700)),
        "group_advantages, warps": Case(lambda: d3s.group_advantages(small)),
        "group_advantages, blocks": Case(lambda: d3s.group_advantages(rewards, scale="batch")),
        "compact": Case(lambda: d3s.compact(mask, 70_000)),
    }


def tensors(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", cases())
def test_threads_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()[name]
    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("D3S_SHIM_SEED", "0")
    first = tensors(case.run())
    for seed in SEEDS:
        monkeypatch.setenv("D3S_SHIM_SEED", str(seed))
        for ours, expected in zip(tensors(case.run()), first, strict=True):
            assert_same_bits(ours, expected)


# ---- logits ----------------------------------------------------------------------------------------------------------

VOCABULARIES = (1, 7, 1023, 8192, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_few_rows_and_many(vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(4, vocabulary, dtype=dtype)
    labels = random_labels(4, vocabulary=vocabulary)
    results = []
    for multiprocessors in (1, 2, 132):  # 2: the last whose rows are shared out, 3 x 2 x 2 > 4
        monkeypatch.setenv("D3S_SHIM_SMS", str(multiprocessors))
        results.append(d3s.logprob_entropy(logits, labels))
    expected = reference.logprob_entropy(logits, labels)
    assert_logprob(results[0][0], expected[0])
    assert_entropy(results[0][1], expected[1])
    for result in results[1:]:
        assert_same_bits(result[0], results[0][0])
        assert_same_bits(result[1], results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [3, 8, 1021, SLICE + 9])
def test_rows_that_lie_askew(vocabulary: int, dtype: torch.dtype) -> None:
    rows = random_logits(2, vocabulary, dtype=dtype)
    labels = torch.tensor([vocabulary - 1, 0])
    expected = d3s.logprob_entropy(rows, labels)
    exact = reference.logprob_entropy(rows.double().requires_grad_(), labels)
    assert_entropy(expected[1], exact[1])
    expected_gradient = gradient(rows, labels)
    for moved in at_every_place(rows):
        for ours, theirs in zip(d3s.logprob_entropy(moved, labels), expected, strict=True):
            assert_same_bits(ours, theirs)
        leaf = moved.requires_grad_()
        logprob, entropy = d3s.logprob_entropy(leaf, labels)
        (ours,) = torch.autograd.grad(logprob.sum() + 0.5 * entropy.sum(), leaf)
        assert_same_bits(ours, expected_gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_written_askew(dtype: torch.dtype) -> None:
    """Logits aligned, rows of an odd length: the gradient, which is packed, lies otherwise than they do."""
    room = random_logits(5, 1032, dtype=dtype)
    logits = room[:, :1021]
    labels = torch.tensor([0, 1020, 7, -100, 8])
    ours = torch.autograd.grad(
        torch.stack(d3s.logprob_entropy(leaf := logits.detach().requires_grad_(), labels)).sum(), leaf
    )
    exact = logits.double().requires_grad_()
    theirs = torch.autograd.grad(torch.stack(reference.logprob_entropy(exact, labels)).sum(), exact)
    assert_gradient(ours[0], theirs[0])


def test_a_masked_row_is_not_read(one_multiprocessor: None) -> None:
    logits = random_logits(3, 1000)
    logits[1] = torch.nan
    row_mask = torch.tensor([True, False, True])
    entropy = d3s.entropy(logits, row_mask=row_mask)
    assert entropy[1] == 0
    assert_entropy(entropy, reference.entropy(logits, row_mask=row_mask))


def test_more_rows_than_a_grid_is_wide() -> None:
    logits = torch.randn(70_001, 3)
    labels = torch.randint(3, (70_001,))
    for ours, exact in zip(d3s.logprob_entropy(logits, labels), reference.logprob_entropy(logits, labels), strict=True):
        torch.testing.assert_close(ours, exact.float(), atol=1e-5, rtol=1e-6)


# ---- selections: both sides of every threshold -----------------------------------------------------------------------

LENGTHS = (0, 1, 31, 32, 33, 1024, 1025, 2048, 2049, 4096, 4097, 16384, 16385, 40_000)


@pytest.mark.parametrize("shared", ["232448", SMALL_SHARED])
@pytest.mark.parametrize("length", LENGTHS)
def test_topk_of_any_length(length: int, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3S_SHIM_SHARED", shared)
    for scores in (torch.randn(2, length), torch.randint(0, 4, (2, length)).float()):
        assert_identical(d3s.topk_mask(scores, 0.2), reference.topk_mask(scores, 0.2))
        ours = d3s.select_tokens(scores, torch.tensor([1.0, -2.0]), 0.2, scope="sequence", drop_zeros=True)
        theirs = reference.select_tokens(scores, torch.tensor([1.0, -2.0]), 0.2, scope="sequence", drop_zeros=True)
        for mine, exact in zip(ours, theirs, strict=True):
            assert_identical(mine, exact)


@pytest.mark.parametrize("shared", ["232448", SMALL_SHARED])
@pytest.mark.parametrize("max_segment", [None, 1, 5000, 20_000])
def test_topk_of_segments_longer_than_said(
    max_segment: int | None, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_segment is a hint: where it is wrong the result is right."""
    monkeypatch.setenv("D3S_SHIM_SHARED", shared)
    scores = torch.randint(0, 100, (30_000,)).float()
    offsets = torch.tensor([0, 0, 10, 2058, 4107, 24_000, 30_000])
    ours = d3s.topk_mask(scores, 0.1, offsets=offsets, max_segment=max_segment)
    assert_identical(ours, reference.topk_mask(scores, 0.1, offsets=offsets))


@pytest.mark.parametrize("length", [1, 2, 31, 64, 127, 128, 129, 512, 513, 1024, 1025, 2049, 4095, 4096, 4097, 9001])
def test_max_variance_of_any_length(length: int) -> None:
    for values in (torch.randn(3, length), torch.randint(0, 3, (3, length)).float()):
        for keep in {1, 2, length // 3 + 1, length}:
            ours = d3s.max_variance_select(values, keep)
            assert_identical(ours, reference.max_variance_select(values, keep))


@pytest.mark.parametrize("max_segment", [None, 1, 100, 3000, 8000])
def test_max_variance_of_segments_longer_than_said(max_segment: int | None) -> None:
    values = torch.randint(0, 9, (12_000,)).float()
    offsets = torch.tensor([0, 100, 100, 228, 357, 3000, 9000, 12_000])
    ours = d3s.max_variance_select(values, 40, offsets=offsets, max_segment=max_segment)
    assert_identical(ours, reference.max_variance_select(values, 40, offsets=offsets))


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


@pytest.mark.parametrize("n", [0, 1, 15, 32_767, 32_768, 32_769, 2_097_152, 2_097_153])
def test_compact_of_any_length(n: int) -> None:
    room = torch.rand(n + 3) < 0.2
    for mask in (room[:n], room[3:]):  # the second starts askew
        for capacity in (0, n // 10, n):
            for ours, expected in zip(d3s.compact(mask, capacity), reference.compact(mask, capacity), strict=True):
                assert_identical(ours, expected)


# ---- values that nobody checked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, -99, -101, 50, 2**31, -(2**63)])
def test_a_label_that_is_no_token(label: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(3, 50)
    labels = torch.tensor([3, label, -100])
    logprob, entropy = d3s.logprob_entropy(logits, labels)
    assert logprob.isnan().tolist() == [False, True, False]
    assert not entropy.isnan().any()
    gradient(logits, labels)
    monkeypatch.setenv("D3S_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="labels: got"):
        d3s.logprob_entropy(logits, labels)


BAD_OFFSETS = [[0, 10, 5, 20], [5, 20], [0, 7], [0, 40], [-9, 20], [0, 2**31 - 1, 20], [20, 0], [7]]


@pytest.mark.parametrize("offsets", BAD_OFFSETS)
def test_bad_offsets_stay_within_bounds(offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    values, cuts = torch.randn(20), torch.tensor(offsets)
    groups = len(offsets) - 1
    monkeypatch.setenv("D3S_SHIM_SHARED", SMALL_SHARED)
    results = [
        d3s.topk_mask(values, 0.5, offsets=cuts),
        d3s.topk_mask(torch.randn(9000), 0.5, offsets=cuts * 450, max_segment=8000),
        d3s.max_variance_select(values, 2, offsets=cuts),
        d3s.max_variance_select(torch.randn(9000), 2, offsets=cuts * 450, max_segment=8000),
        d3s.select_rollouts(values, 1, offsets=cuts),
        *d3s.select_tokens(values, torch.ones(groups), 0.5, offsets=cuts, scope="sequence"),
        d3s.select_tokens(values, torch.ones(groups), 0.5, offsets=cuts).mask if groups else torch.zeros(0),
        d3s.group_advantages(values, offsets=cuts),
    ]
    for result in results:
        if result.dtype == torch.bool:  # every byte was written
            assert ((result.view(torch.uint8) == 0) | (result.view(torch.uint8) == 1)).all()
    monkeypatch.setenv("D3S_KERNELS_CHECK", "1")
    with pytest.raises(ValueError, match="offsets: "):
        d3s.topk_mask(values, 0.5, offsets=cuts)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, torch.nan])
def test_a_bad_ratio_selects_nothing(ratio: float) -> None:
    kept = d3s.select_tokens(torch.rand(100), torch.tensor(1.0), torch.tensor(ratio))
    assert not kept.mask.any()
    assert (kept.count.item(), kept.threshold.item()) == (0, torch.inf)


def test_a_bad_keep_selects_nothing() -> None:
    assert not d3s.max_variance_select(torch.rand(5, 9), torch.tensor(0)).any()
    assert not d3s.max_variance_select(torch.rand(5, 9000), torch.tensor(-1)).any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, torch.nan, torch.inf])
def test_a_bad_temperature_gives_nan(temperature: float) -> None:
    assert d3s.entropy(random_logits(2, 9), temperature=torch.tensor([1.0, temperature])).isnan().tolist() == [
        False,
        True,
    ]


@pytest.mark.skipif("D3S_EMULATED_LIBRARY" not in os.environ, reason="a GPU's shared memory is what it is")
def test_the_launch_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3S_SHIM_SHARED", "1")
    with pytest.raises(RuntimeError, match="d3s_kernels: topk_mask"):
        d3s.topk_mask(torch.randn(9), 0.5)


def test_long_offsets_of_a_batch() -> None:
    values = torch.randint(0, 5, (50_000,)).float()
    offsets = cut(len(values), 40)
    assert_identical(
        d3s.max_variance_select(values, 7, offsets=offsets), reference.max_variance_select(values, 7, offsets=offsets)
    )
