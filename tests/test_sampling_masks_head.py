"""The LM head with a sampling mask: only the columns that were kept are computed."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from helpers import DTYPES, NAN, assert_same_bits
from test_head import Head, check
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d3s_kernels import SamplingMask, linear_logprob_entropy

WIDTHS = (1, 63, 64, 200)
LENGTHS = [1, 5, 2, 0, 40, 1, 3, 300]


class Case:
    """A head, spans of several lengths, and a label in each."""

    def __init__(self, width: int = 64, vocabulary: int = 1001, dtype: torch.dtype = torch.float32) -> None:
        spans = [torch.randperm(vocabulary)[:length] for length in LENGTHS]
        self.labels = torch.tensor([int(span[-1]) if len(span) else 7 for span in spans])
        self.mask = SamplingMask(torch.cat(spans).int(), torch.tensor([0, *accumulate(LENGTHS)]))
        self.hidden = torch.randn(len(LENGTHS), width).to(dtype)
        self.weight = (torch.randn(vocabulary, width) * 3 / width**0.5).to(dtype)
        self.bias = torch.randn(vocabulary).to(dtype)
        self.cotangents = [torch.randn(len(LENGTHS)) for _ in range(2)]

    def touched(self) -> Tensor:
        """Tokens of the spans that are computed."""
        kept = torch.zeros(len(self.weight), dtype=torch.bool)
        for span in self.mask.to_lists():
            if len(span) > 1:
                kept[span] = True
        return kept

    def __call__(self, **options: object) -> tuple[Tensor, ...]:
        """Results, and the gradients of hidden, weight and bias."""
        leaves = [part.detach().requires_grad_() for part in (self.hidden, self.weight, self.bias)]
        given = {"bias": leaves[2], "sampling_mask": self.mask, **options}
        results = linear_logprob_entropy(leaves[0], leaves[1], self.labels, **given)  # type: ignore[arg-type]
        found = torch.autograd.grad(results, leaves, self.cotangents, allow_unused=True)
        return *(result.detach() for result in results), *found


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_against_float64(width: int, dtype: torch.dtype) -> None:
    case = Case(width, dtype=dtype)
    head = Head(case.hidden, case.weight, case.bias)
    check(head, case.labels, sampling_mask=case.mask, temperature=0.7, logit_softcap=20.0)


def test_as_the_dense_head_with_minus_infinity_elsewhere() -> None:
    case = Case()
    kept = torch.zeros(len(LENGTHS), len(case.weight), dtype=torch.bool)
    for row, span in enumerate(case.mask.to_lists()):
        kept[row, span or slice(None)] = True
    for row in range(len(LENGTHS)):
        bias = case.bias.masked_fill(~kept[row], -torch.inf)
        given = case.hidden[row : row + 1], case.weight, case.labels[row : row + 1]
        dense = linear_logprob_entropy(*given, bias=bias)
        ours = linear_logprob_entropy(*given, bias=case.bias, sampling_mask=case.mask.index_select([row]))
        for one, other in zip(ours, dense, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_what_was_not_kept_is_not_read() -> None:
    """Neither weights outside of all spans, nor hidden states of rows with a single kept token or out of the mask."""
    case = Case()
    mask = torch.tensor([length > 0 for length in LENGTHS])
    clean = case(mask=mask, max_dense_rows=0)
    case.weight[~case.touched()] = NAN
    case.hidden[[0, 3, 5]] = NAN
    for ours, theirs in zip(case(mask=mask, max_dense_rows=0), clean, strict=True):
        assert_same_bits(ours, theirs)
    for result in clean[:3]:
        assert not result[[0, 3, 5]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_ones_own_gets_the_touched_rows_alone(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    mask = torch.tensor([length > 0 for length in LENGTHS])
    given = {"mask": mask, "max_dense_rows": 0}
    wanted = case(**given)[3]
    into = torch.full(case.weight.shape, NAN)
    touched = case.touched()
    into[touched] = 0.5
    for calls in (1, 2):
        assert case(weight_grad_into=into, **given)[3] is None
        assert into[~touched].isnan().all()
        off = 1e-5 if dtype == torch.float32 else 2**-7 * float(wanted[touched].abs().max())  # `wanted` is rounded
        torch.testing.assert_close(into[touched], 0.5 + calls * wanted[touched].float(), rtol=1e-5, atol=off)


def test_the_same_bits_from_run_to_run_and_in_any_batch() -> None:
    case = Case()
    whole = case()
    for ours, theirs in zip(case(), whole, strict=True):
        assert_same_bits(ours, theirs)
    rows = [7, 2, 4]
    ours = linear_logprob_entropy(
        case.hidden[rows], case.weight, case.labels[rows], bias=case.bias, sampling_mask=case.mask.index_select(rows)
    )
    for some, everything in zip(ours, whole, strict=False):
        assert_same_bits(some, everything[rows])


@pytest.mark.parametrize("part", ["hidden", "weight", "bias"])
def test_a_part_alone(part: str) -> None:
    case = Case()
    leaf = getattr(case, part).requires_grad_()
    results = linear_logprob_entropy(case.hidden, case.weight, case.labels, bias=case.bias, sampling_mask=case.mask)
    (alone,) = torch.autograd.grad(results, leaf, case.cotangents)
    leaf.requires_grad_(False)
    assert_same_bits(alone, dict(zip(("hidden", "weight", "bias"), case()[2:], strict=True))[part])


class _Largest(TorchDispatchMode):
    """The most bytes of a tensor that a call makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes())
        return result


def test_nothing_is_as_large_as_the_vocabulary() -> None:
    case = Case(vocabulary=50_000)
    given = {"sampling_mask": case.mask, "mask": torch.tensor([length > 0 for length in LENGTHS]), "max_dense_rows": 0}
    into = torch.zeros(case.weight.shape)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    with _Largest() as seen:
        sum(linear_logprob_entropy(hidden, weight, case.labels, weight_grad_into=into, **given)).sum().backward()
    assert seen.most < 4 * 50_000 + 16 * len(case.mask.token_ids)  # with one row of logits, for the checks


def test_bad_spans_are_refused() -> None:
    case = Case()
    case.mask.token_ids[3] = 1001
    with pytest.raises(ValueError, match=r"sampling_mask: got id 1001 at row 1; takes tokens in \[0, 1001\)"):
        case()
    with pytest.raises(ValueError, match="max_dense_rows: got 2 without a sampling_mask"):
        linear_logprob_entropy(case.hidden, case.weight, case.labels, max_dense_rows=2)
