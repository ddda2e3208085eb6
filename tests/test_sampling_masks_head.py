"""The LM head with a sampling mask: only the columns that were kept are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import pytest
import torch
from helpers import DTYPES, NAN, assert_gradient, assert_same, assert_same_bits, threads
from test_head import Head, check, random_head
from test_sampling_masks import random_spans, touched_by
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from d3s_kernels import SamplingMask, linear_logprob_entropy, reference

WIDTHS = (1, 63, 64, 896, 3584, 8192)
LENGTHS = [1, 5, 2, 0, 40, 1, 3, 300]
SPANS = [1, 5, 2, 2000, 40, 1, 3, 300]  # without an empty one
HALF = torch.bfloat16


class Case:
    """A head, spans of several lengths, and a label in each."""

    def __init__(
        self,
        width: int = 64,
        vocabulary: int = 1001,
        dtype: torch.dtype = torch.float32,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        self.mask, self.labels = random_spans(list(lengths), vocabulary)
        self.hidden, self.weight, self.bias = random_head(len(lengths), width=width, vocabulary=vocabulary, dtype=dtype)
        self.cotangents = list(torch.randn(2, len(lengths)))

    def of(self, rows: list[int]) -> Case:
        """These rows, in this order, with the same head."""
        part = copy(self)
        part.mask, part.labels, part.hidden = self.mask.index_select(rows), self.labels[rows], self.hidden[rows]
        part.cotangents = [given[rows] for given in self.cotangents]
        return part

    @property
    def head(self) -> Head:
        return Head(self.hidden, self.weight, self.bias)

    def touched(self) -> Tensor:
        return touched_by(self.mask, len(self.weight))

    def __call__(self, **options: object) -> tuple[Tensor, ...]:
        """Results, and the gradients of hidden, weight and bias."""
        head = Head(*(part.detach().requires_grad_() for part in self.head))
        results = head(linear_logprob_entropy, self.labels, **{"sampling_mask": self.mask, **options})
        found = torch.autograd.grad(results, head.leaves, self.cotangents, allow_unused=True)
        return *(result.detach() for result in results), *found

    def exact(self) -> tuple[Tensor, ...]:
        """The same in float64."""
        leaves = self.head.exact()
        results = leaves(reference.linear_logprob_entropy, self.labels, sampling_mask=self.mask)
        found = torch.autograd.grad(results, leaves.leaves, [given.double() for given in self.cotangents])
        return *(result.detach() for result in results), *found


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width: int, dtype: torch.dtype) -> None:
    case = Case(width, vocabulary=1001 if width < 1000 else 307, dtype=dtype)
    check(case.head, case.labels, sampling_mask=case.mask, temperature=0.7, logit_softcap=20.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outside", ["nan", "include"])
def test_spans_of_all_lengths_beside_each_other(outside: str, dtype: torch.dtype) -> None:
    """Labels are first or last in their spans, or missing where they are included; temperatures are those of rows."""
    lengths = [1, 5000, 0, 2, 2, 3, 1, 1, 33, *(5000 ** torch.rand(9)).int().tolist()]
    case = Case(vocabulary=5003, dtype=dtype, lengths=lengths)
    labels = torch.tensor([span[-(row % 2)] if span else 5002 for row, span in enumerate(case.mask.to_lists())])
    if outside == "include":
        labels[::3] = torch.randint(5003, labels[::3].shape)
    labels[[4, 6]] = -100
    options = {"temperature": 0.5 + torch.rand(len(lengths)), "logit_softcap": 30.0, "label_outside": outside}
    check(case.head, labels, sampling_mask=case.mask, **options)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 7, 8, 9, 17])
def test_sets_of_up_to_all_tokens(vocabulary: int) -> None:
    for dtype in DTYPES:
        case = Case(5, vocabulary, dtype, lengths=[*range(vocabulary + 1), vocabulary])
        check(case.head._replace(bias=None), case.labels, sampling_mask=case.mask)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_token_of_all_rows_beside_a_long_span(dtype: torch.dtype) -> None:
    """The gradient of the token that 3,000 rows have is right, and so is that of tokens which one row has."""
    case = Case(16, 5003, dtype, lengths=[2] * 3000 + [5000])
    case.mask.token_ids[:6000:2] = 11
    case.mask.token_ids[1:6000:2].remainder_(10)
    case.labels[:3000] = torch.where(torch.rand(3000) < 0.5, 11, case.mask.token_ids[1:6000:2])
    found = case(max_dense_rows=0)
    assert_same(case(max_dense_rows=0), found)
    # In float64, the short rows have logits of the first tokens alone.
    short, long = case.of(list(range(3000))), case.of([3000])
    short.weight, short.bias = case.weight[:12], case.bias[:12]
    some, other = short.exact(), long.exact()
    step = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for ours, *parts in zip(found[:3], some[:3], other[:3], strict=True):
        torch.testing.assert_close(ours.double(), torch.cat(parts), rtol=step, atol=1e-5)
    for ours, part, whole in zip(found[3:], some[3:], other[3:], strict=True):
        whole[:12] += part
        for tokens in (slice(11, 12), slice(11), slice(12, None)):
            assert_gradient(ours[tokens], whole[tokens], floor=1e-4)


def test_what_was_not_kept_is_not_read() -> None:
    """Neither weights outside of all spans, nor hidden states of rows with a single kept token or out of the mask."""
    case = Case()
    mask = torch.tensor(LENGTHS) > 0
    clean = case(mask=mask, max_dense_rows=0)
    case.weight[~case.touched()] = NAN
    case.hidden[[0, 3, 5]] = NAN
    assert_same(case(mask=mask, max_dense_rows=0), clean)
    for result in clean[:3]:
        assert not result[[0, 3, 5]].any()


@pytest.mark.parametrize("bound", [0, None])
def test_a_single_kept_token_gives_exactly_0(bound: int | None) -> None:
    """Results and all gradients, whatever hidden states and weights are."""
    case = Case(lengths=[1] * 6)
    case.labels[2] = -100
    for part in case.head:
        part.fill_(NAN)
    for outside in ("nan", "include"):
        for result in case(max_dense_rows=bound, label_outside=outside):
            assert not result.any()


# ---- dense rows ------------------------------------------------------------------------------------------------------

EMPTY = [0, 2, 1, 0, 5, 0]
COUNTS = torch.tensor([True, True, True, True, True, False])  # two of the rows with an empty span, of three


@pytest.mark.parametrize("bound", [0, 1])
def test_more_dense_rows_than_the_bound_are_nan(bound: int) -> None:
    """All results and gradients, except the results of a row that the mask leaves out."""
    logprob, entropy, of_hidden, *gradients = Case(lengths=EMPTY)(mask=COUNTS, max_dense_rows=bound)
    for result in (logprob, entropy):
        assert result[COUNTS].isnan().all()
        assert not result[~COUNTS].any()
    for gradient in (of_hidden[COUNTS], *gradients):
        assert gradient.isnan().all()


@pytest.mark.parametrize("bound", [{"max_dense_rows": 0}, {"max_dense_rows": 1}, {"max_grad_rows": 1}], ids=str)
def test_an_exceeded_bound_shows_where_a_gradient_is_added(bound: dict[str, int]) -> None:
    """In the rows that were written, of which those of kept tokens always are."""
    case, counts = Case(lengths=EMPTY), COUNTS
    if "max_grad_rows" in bound:  # where no dense row carries the NaN
        counts, bound = COUNTS & (torch.tensor(EMPTY) > 0), bound | {"max_dense_rows": 0}
    into = torch.zeros(case.weight.shape)
    _, _, of_hidden, _, of_bias = case(mask=counts, weight_grad_into=into, **bound)
    assert of_hidden[counts].isnan().all()
    assert of_bias.isnan().all()
    assert into[case.touched()].isnan().all()


# ---- the weight's gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_gradient_of_ones_own_gets_the_touched_rows_alone(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    given = {"mask": torch.tensor(LENGTHS) > 0, "max_dense_rows": 0}
    wanted, touched = case(**given)[3], case.touched()
    into = torch.full(case.weight.shape, NAN)
    into[touched] = 0.5
    for calls in (1, 2):
        assert case(weight_grad_into=into, **given)[3] is None
        assert into[~touched].isnan().all()
        off = 1e-5 if dtype == torch.float32 else 2**-7 * float(wanted[touched].abs().max())  # `wanted` is rounded
        torch.testing.assert_close(into[touched], 0.5 + calls * wanted[touched].float(), rtol=1e-5, atol=off)


def test_a_row_without_a_gradient_changes_nothing() -> None:
    """NaN in its hidden states reaches no gradient; nor does it where the gradient goes to a tensor of the caller's."""
    case, live = Case(lengths=SPANS, vocabulary=2001), [1, 4, 7]
    idle = torch.ones(len(SPANS), dtype=torch.bool).index_fill_(0, torch.tensor(live), False)
    for given in case.cotangents:
        given[idle] = 0
    expected = case.of(live)()[2:]
    case.hidden[idle] = NAN
    into = torch.zeros(case.weight.shape)
    *_, of_hidden, of_weight, of_bias = case()
    assert_same_bits(of_hidden[live], expected[0])
    assert not of_hidden[idle].any()
    assert case(weight_grad_into=into, max_dense_rows=0)[3] is None
    for ours, theirs in ((of_weight, expected[1]), (into, expected[1]), (of_bias, expected[2])):
        assert_gradient(ours, theirs.double())


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_an_undefined_row_is_nan_in_every_gradient_it_has(dtype: torch.dtype) -> None:
    """In its hidden states', and in those of its tokens: nowhere else, and of what is added elsewhere too."""
    case, into = Case(lengths=SPANS, vocabulary=2001, dtype=dtype), torch.zeros(2001, 64)
    case.hidden[2, 5] = NAN
    tokens = touched_by(case.mask.index_select([2]), 2001)
    logprob, entropy, of_hidden, of_weight, of_bias = case(max_dense_rows=0)
    assert case(max_dense_rows=0, weight_grad_into=into)[3] is None
    for found in (logprob, entropy, of_hidden):
        assert found.reshape(len(SPANS), -1).isnan().all(1).tolist() == [row == 2 for row in range(len(SPANS))]
    for found in (of_weight, into, of_bias):
        assert_same_bits(found.isnan().reshape(2001, -1).all(1), tokens)
        assert not found[~tokens].isnan().any()


def test_without_a_gradient() -> None:
    case, into = Case(), torch.zeros(1001, 64)
    expected = case()
    given, head = {"sampling_mask": case.mask, "weight_grad_into": into}, case.head.requiring_grad()
    with torch.no_grad():
        found = head(linear_logprob_entropy, case.labels, **given)
    assert not any(result.requires_grad for result in found)
    assert not into.any()
    assert_same(found, expected[:2])


@pytest.mark.parametrize("part", ["hidden", "weight", "bias"])
def test_a_part_alone(part: str) -> None:
    """The first row has a gradient: for the bias alone, its hidden states are a null pointer."""
    case = Case(lengths=LENGTHS[1:])
    leaf = getattr(case, part).requires_grad_()
    results = case.head(linear_logprob_entropy, case.labels, sampling_mask=case.mask)
    assert_same(torch.autograd.grad(results, leaf, case.cotangents), [case()[2 + Head._fields.index(part)]])


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 896])
def test_the_same_bits_from_run_to_run_and_in_any_batch(width: int, dtype: torch.dtype) -> None:
    """Alone, in halves and in another order, a row has the same results and the same gradient of its hidden states."""
    case = Case(width, vocabulary=2001, dtype=dtype, lengths=SPANS)
    whole, every = case(), list(range(len(SPANS)))
    assert_same(case(), whole)
    for rows in (*([row] for row in every), every[:4], every[4:], torch.randperm(len(SPANS)).tolist()):
        assert_same(case.of(rows)()[:3], tuple(result[rows] for result in whole[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_same_bits_with_any_number_of_threads(dtype: torch.dtype) -> None:
    case = Case(200, 3001, dtype, lengths=SPANS * 15)
    with threads(1):
        expected = case(max_dense_rows=0)
    for count in (2, 3):
        with threads(count):
            assert_same(case(max_dense_rows=0), expected)


@pytest.mark.parametrize("form", ["twice", "reentrant checkpoint", "checkpoint"])
def test_a_backward_of_its_own_changes_no_bit(form: str) -> None:
    """A second backward, and those of checkpoints. What a checkpoint computes again is added once."""
    case, into = Case(lengths=SPANS, vocabulary=2001), torch.zeros(2001, 64)
    expected, leaves = case(), case.head.requiring_grad()
    given = {"sampling_mask": case.mask, "max_dense_rows": 0}
    whole = leaves(linear_logprob_entropy, case.labels, **given)
    if form == "twice":
        for _ in range(2):
            again = torch.autograd.grad(whole, leaves.leaves, case.cotangents, retain_graph=True)
            assert_same((*(result.detach() for result in whole), *again), expected)
        return

    def head(*parts: Tensor) -> tuple[Tensor, Tensor]:
        return Head(*parts)(linear_logprob_entropy, case.labels, **given, weight_grad_into=into)

    results = checkpoint(head, *leaves, use_reentrant=form.startswith("re"))
    torch.autograd.backward(results, case.cotangents)
    assert leaves.weight.grad is None
    found = (*(result.detach() for result in results), leaves.hidden.grad, into, leaves.bias.grad)
    assert_same(found, expected)


# ---- strides ---------------------------------------------------------------------------------------------------------


def test_offsets_that_are_not_contiguous() -> None:
    case = Case()
    expected = case()
    case.mask = SamplingMask(case.mask.token_ids, torch.stack([case.mask.offsets] * 2, 1)[:, 0])
    assert_same(case(), expected)


# A part of the head, the shape of the memory, and what is taken of it.
LAYOUTS: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "a part of wider states": ("hidden", (2, 4, 21), lambda base: base[..., 3:19]),
    "one sequence expanded": ("hidden", (1, 4, 16), lambda base: base.expand(2, -1, -1)),
    "width first": ("hidden", (16, 2, 4), lambda base: base.permute(1, 2, 0)),
    "a part of a wider weight": ("weight", (1001, 21), lambda base: base[:, 3:19]),
    "transposed": ("weight", (16, 1001), lambda base: base.T),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(layout: str) -> None:
    """What the head takes without a sampling mask, it takes with one. Labels have the two dimensions of the rows."""
    case, (part, shape, take) = Case(16), LAYOUTS[layout]
    base, labels = torch.randn(shape).requires_grad_(), case.labels.view(2, 4)
    found = []
    for values in (take(base), take(base).contiguous()):
        head = Head(case.hidden.view(2, 4, 16), case.weight, case.bias)._replace(**{part: values})
        results = head(linear_logprob_entropy, labels, sampling_mask=case.mask)
        found.append((*results, *torch.autograd.grad(results, base, [given.view(2, 4) for given in case.cotangents])))
    for strided, contiguous in zip(*found, strict=True):
        assert strided.shape == contiguous.shape
        torch.testing.assert_close(strided, contiguous)


# ---- memory ----------------------------------------------------------------------------------------------------------


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
    given = {"sampling_mask": case.mask, "mask": torch.tensor(LENGTHS) > 0, "max_dense_rows": 0}
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
    case.mask.token_ids[3] = case.mask.token_ids[2]
    with pytest.raises(ValueError, match=r"sampling_mask: got id \d+ twice at row 1; takes each once"):
        case()
    case.mask.token_ids[0], case.labels[0] = 6, 7
    with pytest.raises(ValueError, match="labels: got 7 at row 0, which the row's support in sampling_mask lacks"):
        case.of([0])()
    with pytest.raises(ValueError, match="max_dense_rows: got 2 without a sampling_mask"):
        linear_logprob_entropy(case.hidden, case.weight, case.labels, max_dense_rows=2)
