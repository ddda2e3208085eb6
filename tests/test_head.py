"""linear_logprob_entropy: the LM head that never keeps its logits."""

import math
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    DTYPES,
    INF,
    NAN,
    assert_entropy,
    assert_gradient,
    assert_logprob,
    assert_same,
    random_labels,
    slow,
    slow_elsewhere,
    unwritten,
    whole_number_product,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from d3s_kernels import linear_logprob_entropy, logprob_entropy, reference
from d3s_kernels._dispatch import backends
from d3s_kernels._lm_head import forward as forward_of_head
from d3s_kernels._lm_head import op, products, tiles
from d3s_kernels._lm_head.problem import HeadProblem


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def requiring_grad(self) -> "Head":
        return Head(*(None if t is None else t.detach().clone().requires_grad_() for t in self))

    def exact(self) -> "Head":
        return Head(*(None if t is None else t.detach().double().requires_grad_() for t in self))

    def shard(self, first: int, last: int) -> "Head":
        return Head(self.hidden, *(None if t is None else t[first:last] for t in self[1:]))

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]

    def __call__(self, function, labels: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return function(self.hidden, self.weight, labels, bias=self.bias, **options)


def random_head(
    *rows: int,
    width: int = 16,
    vocabulary: int = 300,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Head:
    """Logits with a standard deviation of about 3, like those of a language model."""

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * deviation).to(dtype)

    weight = normal(vocabulary, width, deviation=3 / math.sqrt(width))
    return Head(normal(*rows, width), weight, normal(vocabulary) if bias else None)


def whole_number_head(*rows: int, vocabulary: int = 300, dtype: torch.dtype = torch.float32) -> Head:
    return Head(*whole_number_product(*rows, vocabulary=vocabulary, dtype=dtype), None)


def allowance(
    head: Head,
    labels: Tensor,
    cotangents: list[Tensor],
    temperature: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    logits_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Tensor]:
    """The allowed error of each result, and of the gradients its norm. A logit is off by some rounding steps of the
    terms of its sum, and all other errors follow from that to first order.

    The gradient of a logit is off by 1e-6 g p / temperature in addition, and in half precision it is rounded to the
    dtype of the weight, as the result is; below the smallest normal number, 6e-5 in float16, the steps of that dtype
    do not get smaller. Errors of different logits are independent, so that their squares add up.
    """
    hidden, weight = head.hidden.detach().double(), head.weight.detach().double()
    bias = torch.zeros(()) if head.bias is None else head.bias.detach().double()
    logits = reference._head_logits(hidden, weight, bias, logit_softcap).requires_grad_()
    of_rows = torch.as_tensor(temperature).double().unsqueeze(-1)
    shift = 2**-21 * (hidden.abs() @ weight.abs().T + bias.abs().nan_to_num(posinf=0))
    if logits_dtype != torch.float32:
        terms = (hidden @ weight.T).abs() + logits.detach().abs()
        shift += 4 * torch.finfo(logits_dtype).eps * terms.nan_to_num(posinf=0)  # 4 covers more than first order
    shift /= of_rows
    results = reference.logprob_entropy(logits, labels, temperature=temperature, mask=options.get("mask"))
    p = torch.softmax(logits.detach() / of_rows, -1)
    slope = p * results[1].detach().unsqueeze(-1) - torch.special.entr(p)  # p (log p + H), minus the entropy's gradient
    at_label = shift.gather(-1, labels.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)

    (gradient,) = torch.autograd.grad(results, logits, [cotangent.double() for cotangent in cotangents])
    half = head.hidden.dtype
    step = 0 if half == torch.float32 else torch.finfo(half).eps
    least = 0 if half == torch.float32 else torch.finfo(half).smallest_normal * step  # a step where that is larger
    size = p * (cotangents[0].abs() + cotangents[1].abs()).unsqueeze(-1) / of_rows
    square = (size * (1e-6 + shift) + step * gradient.abs() + least).square().reshape(-1, logits.shape[-1])
    sums = square @ weight.square(), square.T @ hidden.square().reshape(-1, hidden.shape[-1]), square.sum(0)
    norms = [(part.sum() + part.numel() * least**2).sqrt() for part in sums]
    return dict(zip(Head._fields, norms, strict=True)) | {
        "logprob": 1e-5 + 2**-22 * results[0].detach().abs() + at_label + (p * shift).norm(dim=-1),
        "entropy": 1e-5 + (slope * shift).norm(dim=-1),
    }


def assert_exact(
    results: tuple[Tensor, Tensor], gradients: tuple[Tensor, ...], head: Head, labels: Tensor, cotangents: list[Tensor],
    tokens: slice = slice(None), **options: object,
) -> None:  # fmt: skip
    """Compares with float64. Gradients of weight and bias are those of these tokens."""
    exact = head.exact()
    expected = exact(reference.linear_logprob_entropy, labels, **options)
    off = allowance(head, labels, cotangents, **options)
    assert ((results[0] - expected[0]).abs() <= off["logprob"]).all()
    assert ((results[1] - expected[1]).abs() <= off["entropy"]).all()
    assert (results[1] >= 0).all()
    wanted = list(torch.autograd.grad(expected, exact.leaves, [g.double() for g in cotangents]))
    wanted[1:] = [gradient[tokens] for gradient in wanted[1:]]
    for name, gradient, exact_gradient in zip(Head._fields, gradients, wanted, strict=False):  # there may be no bias
        assert_gradient(gradient, exact_gradient, off[name].item())


def with_gradients(
    head: Head, labels: Tensor, cotangents: list[Tensor] | None = None, **options: object
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Results and all gradients, of the sum of both results where nothing else is said."""
    head = head.requiring_grad()
    results = head(linear_logprob_entropy, labels, **options)
    return results, torch.autograd.grad(results, head.leaves, cotangents or [torch.ones(labels.shape)] * 2)


def check(head: Head, labels: Tensor, size: float = 1.0, **options: object) -> None:
    """Compares values and all gradients with float64. ``size`` is that of the results' gradients."""
    cotangents = list(size * torch.randn(2, *labels.shape))
    assert_exact(*with_gradients(head, labels, cotangents, **options), head, labels, cotangents, **options)


def one_row_at_a_time(vocabulary: int) -> int:
    """A workspace for the logits of one row."""
    return 4 * vocabulary


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 2, 31, 50_257, slow(151_936, shows="the longest vocabulary")])
def test_vocabularies(vocabulary: int, dtype: torch.dtype) -> None:
    check(random_head(2, 3, width=64, vocabulary=vocabulary, dtype=dtype), random_labels(2, 3, vocabulary=vocabulary))


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4])
def test_gradients_below_the_normal_numbers_of_float16(size: float) -> None:
    head = random_head(3, width=1, vocabulary=40, dtype=torch.float16, bias=False)
    check(head, random_labels(3, vocabulary=40), size=size, temperature=4.0)


@pytest.mark.slow_elsewhere("the same products of torch")
@pytest.mark.parametrize("rows", [1, slow(2, shows="an even number of rows"), 3])
def test_few_rows_and_weights_that_are_alike(rows: int) -> None:
    """What all tokens' weights have in common cancels in the gradient of a row, after 50,000 additions."""
    head = random_head(rows, width=256, vocabulary=50_000, bias=False)
    head.weight.add_(0.5 * torch.randn(256))
    leaves, exact, labels = head.requiring_grad(), head.exact(), random_labels(rows, vocabulary=50_000)
    (gradient,) = torch.autograd.grad(sum(leaves(linear_logprob_entropy, labels)).sum(), leaves.hidden)
    (wanted,) = torch.autograd.grad(sum(exact(reference.linear_logprob_entropy, labels)).sum(), exact.hidden)
    assert_gradient(gradient, wanted)


HALF = [slow_elsewhere(dtype, shows="half precision in pieces") for dtype in DTYPES if dtype != torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("rows", [1, 64, 65, 200])
@pytest.mark.parametrize("workspace_rows", [1, pytest.param(7, marks=pytest.mark.simd), 64])
def test_pieces_of_the_rows(rows: int, workspace_rows: int, dtype: torch.dtype) -> None:
    """The workspace sets the size of a piece. The last piece may be shorter."""
    workspace_bytes = workspace_rows * one_row_at_a_time(300)
    check(random_head(rows, dtype=dtype), random_labels(rows, vocabulary=300), workspace_bytes=workspace_bytes)


MANY_ROWS = "each dtype and edge of a slice where the rows, too, are taken in pieces"


@pytest.mark.parametrize(
    ("vocabulary", "rows", "dtype"),
    [
        case if case[1] == 3 else slow(*case, shows=MANY_ROWS)
        for case in product((8191, 8193, 20_000), (3, 1100), DTYPES)
    ],
)
def test_pieces_of_the_vocabulary(vocabulary: int, rows: int, dtype: torch.dtype) -> None:
    """The workspace is smaller than a row; rows are fewer and more than are then taken at a time."""
    head, labels = random_head(rows, vocabulary=vocabulary, dtype=dtype), random_labels(rows, vocabulary=vocabulary)
    check(head, labels, workspace_bytes=10_000)


@pytest.mark.parametrize("vocabulary", [300, 8192, 20_000])
def test_given_its_logits_it_is_logprob_entropy(vocabulary: int) -> None:
    """The results are bit-identical, however rows and vocabulary are divided into tiles."""
    head, labels = whole_number_head(40, vocabulary=vocabulary), random_labels(40, vocabulary=vocabulary)
    expected = logprob_entropy(head.hidden @ head.weight.T, labels)
    for workspace_bytes in (None, 1, one_row_at_a_time(vocabulary), 500_000):
        assert_same(head(linear_logprob_entropy, labels, workspace_bytes=workspace_bytes), expected)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float16])
def test_logits_may_be_rounded(logits_dtype: torch.dtype) -> None:
    head, labels = whole_number_head(40, dtype=logits_dtype), random_labels(40, vocabulary=300)
    rounded = (head.hidden.float() @ head.weight.float().T).to(logits_dtype)
    expected = reference.logprob_entropy(rounded, labels)
    actual = head(linear_logprob_entropy, labels, logits_dtype=logits_dtype)
    assert_logprob(actual[0], expected[0])
    assert_entropy(actual[1], expected[1])


_cuda = sys.modules.get("on_cuda")  # the plugin with which these tests run on a GPU
of_a_cpu = pytest.mark.skipif(_cuda is not None and _cuda.GPU.type == "cuda", reason="about products of a CPU")
_aten = torch.ops.aten
PRODUCTS = (_aten.mm, _aten.matmul, _aten.addmm, _aten.addmm_)


class SeesProducts(TorchDispatchMode):
    """Sees what the forward and the backward of the head call. Around the op, a mode would see the op alone."""

    def of_the_head(self, monkeypatch: pytest.MonkeyPatch) -> "SeesProducts":
        for name in ("forward", "backward"):
            monkeypatch.setattr(op, name, self._around(getattr(op, name)))
        return self

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: object, **options: object) -> Any:
            with self:
                return function(*args, **options)

        return run


class NoHalfProducts(SeesProducts):
    """Refuses matrix products in half precision."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in PRODUCTS:
            assert not {part.dtype for part in args if isinstance(part, Tensor)} & {torch.bfloat16, torch.float16}
        return function(*args, **(kwargs or {}))


@of_a_cpu
@pytest.mark.slow_elsewhere("the same products of torch")
@pytest.mark.parametrize("float32_logits", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a_cpu_without_dot_products_of_half_precision(
    dtype: torch.dtype, float32_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product is left to torch's loops for such CPUs, which take ten times as long. Here over several pieces."""
    monkeypatch.setattr(backends, "half_products", lambda: ())
    monkeypatch.setattr(products, "_WIDE_BYTES", 4 * 16 * 70)
    options = {} if float32_logits else {"logits_dtype": dtype}  # which have exactly the logits of this head
    NoHalfProducts().of_the_head(monkeypatch)
    check(whole_number_head(40, dtype=dtype), random_labels(40, vocabulary=300), workspace_bytes=36_000, **options)


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
def test_rows_out_of_the_mask_or_without_a_gradient_are_not_read(masked: bool) -> None:
    """NaN in such a row reaches no gradient (with autograd, 0 * NaN would)."""
    head, idle = random_head(10), torch.arange(10) % 3 == 0
    head.hidden[idle] = NAN
    wanted, mask = (torch.ones(10), ~idle) if masked else ((~idle).float(), None)
    results, gradients = with_gradients(head, torch.arange(10), [wanted, wanted], mask=mask)
    for result in results:
        assert (result[idle] == 0).all() if masked else result[idle].isnan().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert torch.equal(gradients[0].any(-1), ~idle)


class ProductsThatReadOn(SeesProducts):
    """Products of half precision as oneDNN makes them with AMX (their issue 5717): the last of the blocks of 32 terms
    reads on behind each row but the last, and multiplies by 0 what it finds.
    """

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in PRODUCTS:
            left = next(part for part in args if isinstance(part, Tensor) and part is not result)
            terms = left.shape[1]
            if left.dtype.itemsize == 2 and left.stride(1) == 1 and terms > 32 and terms % 32:
                shape = len(left) - 1, 32 - terms % 32
                behind = left.as_strided(shape, left.stride(), left.storage_offset() + terms)
                result[:-1].add_((behind * 0).sum(1, keepdim=True))
                self.seen += 1
        return result


@of_a_cpu
@pytest.mark.parametrize("float32_logits", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_products_that_read_on_behind_a_row(
    dtype: torch.dtype, float32_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN of one row reaches no other row, and what lay in a tile's memory before reaches none."""
    monkeypatch.setattr(backends, "half_products", lambda: (torch.bfloat16, torch.float16))
    room = tiles.Tiles.room

    def used_before(cut: tiles.Tiles, *place: slice) -> Tensor:
        cut.buffer.fill_(NAN)
        return room(cut, *place)

    monkeypatch.setattr(tiles.Tiles, "room", used_before)
    head, labels = random_head(12, width=40, vocabulary=75, bias=False, dtype=dtype), torch.arange(12)
    broken = torch.arange(12) % 3 == 1
    head.hidden[broken] = NAN
    head = head.requiring_grad()
    reading = ProductsThatReadOn().of_the_head(monkeypatch)
    results = head(linear_logprob_entropy, labels, logits_dtype=torch.float32 if float32_logits else dtype)
    gradient = torch.autograd.grad(sum(results).sum(), head.hidden)[0]
    assert reading.seen == (1 if float32_logits else 3)  # with the library's own product for logits in float32
    for result in (*results, gradient.sum(1)):
        assert (result.isnan() == broken).all()


def test_masked_vocabulary() -> None:
    """A bias of -inf removes tokens from the vocabulary: they do not count, and their weights get no gradient."""
    head, labels = random_head(6), torch.arange(6)
    head.bias[200:] = -INF
    check(head, labels)
    _, (_, *gradients) = with_gradients(head, labels)
    assert not any(gradient[200:].any() for gradient in gradients)


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_backward_twice_gives_the_same_and_writes_to_nothing() -> None:
    head, labels = random_head(30).requiring_grad(), random_labels(30, vocabulary=300)
    with unwritten(labels, *head.leaves):
        loss = sum(head(linear_logprob_entropy, labels, workspace_bytes=10_000)).sum()
        first, second = (torch.autograd.grad(loss, head.leaves, retain_graph=True) for _ in range(2))
    assert_same(first, second)


KEPT_BYTES = {"all": 1 << 30, "two slices": 40 * 8192 * 2 * 4, "less than a slice": 1000}


@of_a_cpu
@pytest.mark.parametrize("keep", KEPT_BYTES)
@pytest.mark.parametrize("logit_softcap", [None, 20.0])
@pytest.mark.parametrize(
    ("dtype", "logits_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_kept_logits_give_the_bits_of_logits_computed_again(
    dtype: torch.dtype, logits_dtype: torch.dtype, logit_softcap: float | None, keep: str
) -> None:
    """Products of whole numbers are exact. Of others, a BLAS library may give a row other bits if there are fewer rows
    beside it, as in the backward here: a third of the rows has no gradient.
    """
    rows, vocabulary = 40, 17_000  # three slices of a CPU
    head, labels = (
        whole_number_head(rows, vocabulary=vocabulary, dtype=dtype),
        random_labels(rows, vocabulary=vocabulary),
    )
    cotangents = [torch.randn(rows) * (torch.arange(rows) % 3 > 0) for _ in range(2)]
    for cotangent in cotangents:
        cotangent[1] = 0
    head.hidden[:2] = NAN  # one of them is the first row that the forward packs, to which unused slots of a bound point
    for masked, bound, workspace in ((False, 40, None), (True, 39, 900_000), (True, None, 300_000)):

        def step(keep: int | None) -> list[Tensor]:
            results, gradients = with_gradients(
                head, labels, cotangents, logits_dtype=logits_dtype, logit_softcap=logit_softcap, temperature=0.7,
                mask=torch.arange(rows) % 4 > 0 if masked else None, max_rows=bound, max_grad_rows=bound,  # noqa: B023
                workspace_bytes=workspace, keep_logits_bytes=keep,  # noqa: B023
            )  # fmt: skip
            return [*results, *gradients]

        kept = step(KEPT_BYTES[keep])
        assert_same(kept, step(None))
        assert all(gradient.isfinite().all() for gradient in kept[2:])


@of_a_cpu
def test_logits_are_kept_only_within_the_budget_and_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[Tensor] = []

    def recorded(problem: HeadProblem) -> Tensor:
        rooms.append(tiles.new_room_for_logits(problem))
        return rooms[-1]

    monkeypatch.setattr(forward_of_head, "new_room_for_logits", recorded)
    head, labels = random_head(9, vocabulary=20_000).requiring_grad(), random_labels(9, vocabulary=20_000)
    whole = 9 * 20_000 * 4  # 20,000 float32 fill whole units of 64 bytes
    for budget, columns in ((whole, 20_000), (whole - 1, 16_384), (9 * 8192 * 4 - 1, 0), (0, 0)):
        head(linear_logprob_entropy, labels, keep_logits_bytes=budget)
        assert rooms[-1].shape == (9 if budget else 0, columns)
    bounded = {"mask": torch.arange(9) < 4, "max_rows": 5}
    head(linear_logprob_entropy, labels, keep_logits_bytes=whole, **bounded)
    assert rooms[-1].shape == (5, 20_000)
    with torch.no_grad():
        head(linear_logprob_entropy, labels, keep_logits_bytes=whole)
    assert not rooms[-1].numel()
    with pytest.raises(ValueError, match="keep_logits_bytes: got -1; takes at least 0"):
        head(linear_logprob_entropy, labels, keep_logits_bytes=-1)


def test_auto_is_the_dtype_of_the_products() -> None:
    """Which is float32, if the hidden states or the weight are."""
    head, labels = random_head(9, dtype=torch.bfloat16), torch.arange(9)
    auto = head(linear_logprob_entropy, labels, logits_dtype="auto")
    assert_same(auto, head(linear_logprob_entropy, labels, logits_dtype=torch.bfloat16))
    mixed = Head(head.hidden.float(), head.weight, None)
    assert_same(mixed(linear_logprob_entropy, labels, logits_dtype="auto"), mixed(linear_logprob_entropy, labels))
    with pytest.raises(TypeError, match=r"logits_dtype: got 'float'; takes a torch\.dtype or 'auto'"):
        head(linear_logprob_entropy, labels, logits_dtype="float")


# ---- the gradient of the hidden states in parts of the vocabulary, as on a GPU --------------------------------------


@of_a_cpu
@pytest.mark.parametrize("parts", [2, 8])
def test_partial_sums(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added in a fixed order, so that repeated calls have the same bits. 300 ids are not a multiple of parts
    that begin at multiples of 8; 5 and 40 ids are too few for all parts.
    """
    for vocabulary, workspace in ((300, None), (5, None), (40, None), (17_000, 4 * 30 * 8192)):
        head, labels = random_head(30, vocabulary=vocabulary), random_labels(30, vocabulary=vocabulary)
        cotangents = [torch.randn(30), torch.randn(30)]

        def gradients() -> tuple[Tensor, ...]:
            return with_gradients(head, labels, cotangents, workspace_bytes=workspace)[1]  # noqa: B023

        whole = gradients()
        with monkeypatch.context() as switched:
            switched.setattr(products, "SPLITS", True)
            switched.setattr(products, "widens", lambda values: True)
            switched.setattr(tiles, "parts_of", lambda *_: parts)
            split, again = gradients(), gradients()
        assert_same(split, again)
        assert_same(split[1:], whole[1:])
        assert (split[0] - whole[0]).norm() <= 1e-6 * whole[0].norm()


def test_strided_inputs() -> None:
    """Hidden states are sliced from a longer sequence, and tied weights are transposed."""
    hidden, weight = torch.randn(3, 9, 16), torch.randn(16, 300).T
    check(Head(hidden[:, 1:-1], weight, None), random_labels(3, 7, vocabulary=300))
    check(Head(hidden.transpose(0, 1), weight, None), random_labels(9, 3, vocabulary=300))
