"""entropy and logprob_entropy, forward and backward."""

import sys
from itertools import product

import pytest
import torch
from cases.draw import SPECIAL, draws
from cases.logprobs import any_logits
from cases.row import Arguments
from helpers import (
    DTYPES,
    INF,
    NAN,
    VOCABULARIES,
    assert_entropy,
    assert_gradient,
    assert_logprob,
    assert_narrow_gradient,
    assert_same_bits,
    random_labels,
    random_logits,
    unwritten,
)
from torch import Tensor

from d3s_kernels import entropy, logprob_entropy, reference

OP = torch.ops.d3s_kernels

# Lengths on both sides of the CPU kernels' units: a pair of vectors (8, 16 or 32 logits) and a chunk (8192).
CUTS = (7, 8, 9, 15, 16, 17, 32, 33, 8191, 8192, 8193, 16_415)


def cancelled(cotangents: Tensor, temperature: float | Tensor = 1.0) -> float:
    """The error that float32 leaves in g (1 - p) / temperature where the label's probability p is nearly 1."""
    return 1e-6 * (cotangents / temperature).norm().item()


def check(logits: Tensor, labels: Tensor, **options: object) -> None:
    """Compares values and both gradients with float64."""
    logits = logits.requires_grad_()
    exact = logits.detach().double().requires_grad_()
    expected = reference.logprob_entropy(exact, labels, **options)
    actual = logprob_entropy(logits, labels, **options)
    assert_logprob(actual[0], expected[0])
    assert_entropy(actual[1], expected[1])

    cotangents = [torch.randn(labels.shape) for _ in range(2)]
    (gradient,) = torch.autograd.grad(actual, logits, cotangents)
    (exact_gradient,) = torch.autograd.grad(expected, exact, [g.double() for g in cotangents])
    assert_gradient(gradient, exact_gradient, floor=cancelled(torch.stack(cotangents), options.get("temperature", 1.0)))


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_vocabularies(vocabulary: int, dtype: torch.dtype) -> None:
    check(random_logits(2, 4, vocabulary, dtype=dtype), random_labels(2, 4, vocabulary=vocabulary))


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", CUTS)
def test_where_a_row_is_cut(vocabulary: int, dtype: torch.dtype) -> None:
    check(random_logits(5, vocabulary, dtype=dtype), random_labels(5, vocabulary=vocabulary), temperature=0.7)


def test_any_logits() -> None:
    for draw in draws(most=80):
        given = any_logits(draw, *SPECIAL, 3e38, -3e38, 1e20, 88.0)
        logprob, row_entropy = logprob_entropy(**given)
        expected = reference.logprob_entropy(**given)
        assert_logprob(logprob, expected[0])
        assert_entropy(row_entropy, expected[1])
        recorded = logprob_entropy(**given | {"logits": given["logits"].clone().requires_grad_()})  # another op
        assert_same_bits(recorded[0].detach(), logprob)
        assert_same_bits(recorded[1].detach(), row_entropy)
        del given["labels"]
        assert_same_bits(entropy(**given), row_entropy)


def test_the_reference_gradient_is_the_derivative() -> None:
    """The float64 gradient, with which all others are compared, is checked here, also beside a masked vocabulary."""
    for draw in draws(20, most=6):
        given = any_logits(draw, 0.0)
        logits = given.pop("logits").double().nan_to_num(0.0, posinf=0.0, neginf=0.0).requires_grad_()
        walls = torch.zeros(logits.shape, dtype=torch.float64)
        walls[..., 1::3] = -INF
        given["labels"] = given["labels"].masked_fill(given["labels"] % 3 == 1, -100)  # -inf has no derivative

        def scores(leaf: Tensor, walls: Tensor = walls, given: Arguments = given) -> tuple[Tensor, ...]:
            return reference.logprob_entropy(leaf + walls, **given)

        assert torch.autograd.gradcheck(scores, (logits,))


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_coarse_logits(temperature: float, dtype: torch.dtype) -> None:
    """Half precision far from 0 has few distinct logits, and equal terms of a sum are rounded the same way."""
    logits = (torch.randn(40, 8192) * 3 - 1000).to(torch.bfloat16).to(dtype)
    check(logits, random_labels(40, vocabulary=8192), temperature=temperature)


def test_matches_a_fair_die_and_torch_distributions() -> None:
    for sides in (1, 2, 31, 8193, 50_257):
        assert_entropy(entropy(torch.full((sides,), 7.0)), torch.tensor(sides).double().log())
    logits = random_logits(40, 1000)
    assert_entropy(entropy(logits), torch.distributions.Categorical(logits=logits.double()).entropy())


@pytest.mark.slow_elsewhere("more rows than a grid has blocks")
def test_many_rows() -> None:
    """More rows than 65,535, the limit of a grid dimension."""
    check(torch.randn(70_000, 5), random_labels(70_000, vocabulary=5))


# ---- special logits --------------------------------------------------------------------------------------------------


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [1, 40, 9000])
def test_padded_vocabulary_counts_nothing(padding: int, dtype: torch.dtype) -> None:
    """-inf logits after, before and between the others change neither the results nor the gradient."""
    logits, labels = random_logits(6, 1000, dtype=dtype), random_labels(6, vocabulary=1000)
    walls = torch.full((6, padding), -INF, dtype=dtype)
    for padded, start in [(torch.cat([logits, walls], -1), 0), (torch.cat([walls, logits], -1), padding)]:
        moved = labels + start * (labels != -100)
        check(padded, moved)
        padded.requires_grad_()
        (gradient,) = torch.autograd.grad(sum(logprob_entropy(padded, moved)).sum(), padded)
        assert (gradient[padded == -INF] == 0).all()


@pytest.mark.parametrize("row", [[-INF] * 3, [0.0, INF, 1.0], [INF, INF, 0.0], [0.0, NAN, 1.0], [NAN, -INF, NAN]])
@pytest.mark.parametrize("width", [3, 20_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_distribution_are_nan(row: list[float], width: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, width).to(dtype)
    logits[1] = torch.tensor(row).repeat(width // 3 + 1)[:width]
    results = logprob_entropy(logits.requires_grad_(), torch.zeros(3, dtype=torch.long))
    (gradient,) = torch.autograd.grad(sum(results).sum(), logits)
    for undefined in (*(result.isnan() for result in results), gradient.isnan().any(1), gradient.isnan().all(1)):
        assert undefined.tolist() == [False, True, False]


@pytest.mark.simd
def test_a_nan_of_any_bits_shows() -> None:
    """Arithmetic on the bits of a float must not turn a NaN into a number."""
    logits, places = torch.randn(400, 50), torch.randint(50, (400,))
    payloads = torch.randint(1, 2**22, (400,), dtype=torch.int32)
    signs = torch.randint(2, (400,), dtype=torch.int32) << 31
    logits[torch.arange(400), places] = (0x7FC00000 | payloads | signs).view(torch.float32)
    for result in logprob_entropy(logits, (places + 1) % 50):
        assert result.isnan().all()


@pytest.mark.parametrize("place", [0, 17, 8191, 8192, 9999])
def test_a_single_finite_logit_is_certain(place: int) -> None:
    logits = torch.full((10_000,), -INF)
    logits[place] = -1234.5
    logprob, row_entropy = logprob_entropy(logits, torch.tensor(place))
    assert (logprob.item(), row_entropy.item()) == (0.0, 0.0)


@pytest.mark.parametrize("height", [5.0, 15.0, 30.0, 60.0, 120.0])
@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_peaked_rows(height: float, shift: float) -> None:
    """Entropies far below 1e-5 keep their leading digits: log S - T / S does not cancel, for logits of any offset."""
    logits = torch.randint(-3, 4, (4, 5000)) + shift  # exact in float32
    logits[:, 77] = height + shift
    expected = reference.entropy(logits)
    found = entropy(logits)
    assert_entropy(found, expected)
    torch.testing.assert_close(found, expected.float(), rtol=0.05, atol=2e-7)


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    """Empty results stay connected to the autograd graph."""
    logits = torch.empty(*shape, 10, requires_grad=True)
    results = logprob_entropy(logits, torch.empty(shape, dtype=torch.long))
    assert all(result.shape == shape and result.dtype == torch.float32 for result in results)
    sum(result.sum() for result in results).backward()
    assert logits.grad.shape == logits.shape


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_backward_twice_gives_the_same_and_writes_to_nothing() -> None:
    logits, labels = random_logits(6, 9000).requires_grad_(), torch.arange(6)
    options = {"temperature": torch.full((6,), 0.9), "mask": torch.arange(6) < 5}
    with unwritten(logits, labels, *options.values()):
        loss = sum(logprob_entropy(logits, labels, **options)).sum()
        first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.simd
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_in_half_precision_over_its_own_logits(dtype: torch.dtype) -> None:
    # Long rows of both dtypes are in cuda_shim/kernels.py, too. The CPU's loop does not cut a row.
    for columns in CUTS if dtype == torch.bfloat16 else CUTS[:8]:
        assert_narrow_gradient(OP.logprob_entropy, OP.logprob_entropy_backward_, columns, dtype)


@pytest.mark.simd
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_some_rows(dtype: torch.dtype) -> None:
    """It has the bits of the gradient over the gathered rows. Rows without a gradient are not read, and nothing else is
    written. All rows begin at multiples of 16 bytes, or the rows of logits and gradient are misaligned differently.
    """
    rows, weights = torch.tensor([4, 1, 1, 0]), torch.randn(2, 4).index_fill(1, torch.tensor([3]), 0.0)
    lengths = CUTS[3::4] if dtype == torch.float32 else CUTS[3:8:4]  # the longest has two pieces on a GPU, in float32
    for columns, (before, behind) in product(lengths, ((0, 0), (3, 1))):
        width = columns + 32 - columns % 16
        kept = torch.full((5, width), NAN, dtype=dtype)[:, before : before + columns]
        kept[[1, 4]] = random_logits(2, columns, dtype=dtype)
        kept[4, 1::3] = -INF
        labels = torch.tensor([columns - 1, columns // 2, -100, 0])
        gathered = kept[rows].nan_to_num(0.0, neginf=-INF)
        _, *found = OP.logprob_entropy(gathered, labels, 0.5)
        for narrow in DTYPES if dtype == torch.float32 else (dtype,):
            room, over = torch.full((4, width), 7.0, dtype=narrow), gathered.clone()
            left, slope, right = room.tensor_split((behind, behind + columns), 1)
            OP.logprob_entropy_backward_rows_(*weights, kept, labels, *found, rows, slope, None, 0.5)
            OP.logprob_entropy_backward_(*weights, over, labels, *found, None, 0.5, grad_dtype=narrow)
            assert_same_bits(slope, over.view(narrow)[:, :columns])
            assert (left == 7).all()
            assert (right == 7).all()


def test_rows_that_cannot_be_read_are_refused() -> None:
    logits, values, out = torch.zeros(4, 3), torch.zeros(5, 2), torch.zeros(2, 3)
    rows = torch.tensor([3, 0])

    def refused(said: str, logits: Tensor = logits, rows: Tensor = rows, out: Tensor = out) -> None:
        with pytest.raises(ValueError, match=f"^{said}"):
            OP.logprob_entropy_backward_rows_(*values[:2], logits, None, *values[2:], rows, out)

    for bad in (-1, 4, 2**40):
        refused(rf"rows: got {bad} at 1; takes a row of the logits, in \[0, 4\)", rows=torch.tensor([0, bad]))
    refused("rows: got dtype torch.int32; takes int64", rows=rows.int())
    refused(r"rows: got shape \[3\]", rows=torch.tensor([0, 1, 2]))
    refused(r"logits: got shape \[4\]", logits=logits[:, 0])
    refused(r"grad_logits: got shape \[2, 2\]", out=out[:, :2])
    refused("grad_logits: got dtype torch.float16", logits=logits.bfloat16(), out=out.half())
    refused("grad_logits: its rows overlap", out=out[0].expand(2, 3))
    if "on_cuda" not in sys.modules:  # which copies each argument
        refused("grad_logits: shares memory with the logits", out=logits[2:])
    refused(r"grad_logprob: got shape \[2\]", rows=rows[:1], out=out[:1])


@pytest.mark.parametrize("output", [0, 1])
def test_nan_that_comes_in_makes_the_whole_gradient_of_its_row_nan(output: int) -> None:
    """Also where a token's probability is 0, so that an exceeded bound of the LM head is seen everywhere."""
    logits = random_logits(3, 40)
    logits[:, ::3] = -INF
    logits.requires_grad_()
    result = logprob_entropy(logits, torch.tensor([1, 2, 4]))[output]
    (gradient,) = torch.autograd.grad(result, logits, torch.tensor([1.0, NAN, 1.0]))
    assert gradient.isnan().all(1).tolist() == [False, True, False]
    assert gradient[::2].isfinite().all()


def test_a_gradient_of_another_dtype_is_refused() -> None:
    for logits, dtype in ((torch.zeros(2, 3), torch.float64), (torch.zeros(2, 3).half(), torch.bfloat16)):
        with pytest.raises(ValueError, match="grad_dtype: got"):
            OP.logprob_entropy_backward_(None, None, logits, None, *torch.zeros(3, 2), 0, grad_dtype=dtype)


def test_without_a_wanted_gradient_there_is_no_graph() -> None:
    logits = random_logits(3, 20)
    assert not entropy(logits).requires_grad
    with torch.no_grad():
        assert not entropy(logits.requires_grad_()).requires_grad
    assert entropy(logits).requires_grad
