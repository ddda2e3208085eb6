"""What the test files share: random inputs, and comparisons with no more tolerance than float32 needs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import d3s_kernels

EVERYTHING = os.environ.get("D3S_TEST_ALL") == "1"  # make test-all

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABULARIES = (1, 2, 31, 50_257, 128_256, 151_936, 152_064)
INF, NAN = math.inf, math.nan


def random_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build_folder(name: str) -> Path:
    """The build folder of the tests, reused by the next run, or a temporary one where that is not writable."""
    build = Path(__file__).parents[1] / "build"
    mine = os.access(build if build.exists() else build.parent, os.W_OK)
    return (build if mine else Path(os.environ["D3S_TEST_CACHES"])) / name


def rounds(all_of_them: int) -> int:
    """The number of random draws in a loop: `make test` makes a quarter of the draws of `make test-all`."""
    return all_of_them if EVERYTHING else -(-all_of_them // 4)


def slow(*values: Any, shows: str) -> Any:
    """A parameter that only `make test-all` runs. `shows` says what only this parameter can show."""
    return pytest.param(*values, marks=pytest.mark.slow(shows))


def slow_elsewhere(*values: Any, shows: str) -> Any:
    """As `slow`, but only where kernels are emulated or written in Python and the parameter takes long."""
    return pytest.param(*values, marks=pytest.mark.slow_elsewhere(shows))


def layer(what: str, printed: str) -> tuple[str, str]:
    """For `record_property`: a suite that has passed in a child process, by what pytest printed there."""
    (passed,) = re.findall(r"(\d+) passed", printed)
    return "layer", f"{what}: {int(passed):,} tests passed"


# ---- comparisons -----------------------------------------------------------------------------------------------------


def assert_identical(actual: Tensor, expected: Tensor) -> None:
    """Numbers, NaN positions, shapes and dtypes are equal."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.dtype.is_floating_point:
        integers = {4: torch.int32, 2: torch.int16}[actual.element_size()]
        actual, expected = actual.contiguous().view(integers), expected.contiguous().view(integers)
    assert torch.equal(actual, expected)


def assert_same(some: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Each tensor has the bits of its counterpart."""
    for one, other in zip(some, others, strict=True):
        assert_same_bits(one, other)


def assert_entropy(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 nats of the float64 result, and never negative."""
    assert not (actual < 0).any()
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-5, equal_nan=True)


def assert_logprob(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 nats. Far below the maximum, four roundings of (z - max) / temperature - log S exceed that."""
    torch.testing.assert_close(actual, expected.float(), rtol=2**-22, atol=1e-5, equal_nan=True)


def assert_gradient(actual: Tensor, expected: Tensor, floor: float = 0.0) -> None:
    """The norm of the error is within 1e-5 of that of the float64 gradient; in half precision, the error against the
    rounded float64 gradient is within a rounding step.

    `floor` is the error that rounding, also of the result, may leave where the terms of the gradient cancel.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, actual.dtype)
    tolerance = 1e-5 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps
    error = (actual.double() - expected.to(actual.dtype).double()).norm().item()
    within_steps = error <= tolerance * expected.double().norm().item()
    assert within_steps or (actual.double() - expected.double()).norm().item() <= floor


def assert_narrow_gradient(statistics: Callable, backward_: Callable, columns: int, dtype: torch.dtype) -> None:
    """A gradient in half precision is the rounded float32 gradient, in the front half of its rows; no other memory is
    written. Rows are far apart and misaligned; two have logits of -inf, one of them with NaN coming in; one is NaN, and
    one has no gradient and is unread.
    """
    logits, labels = random_logits(7, columns), random_labels(7, vocabulary=columns)
    labels[:3] = torch.tensor([0, columns - 1, columns // 2])
    logits[3:5, 1::2] = -INF
    logits[5, columns // 3] = NAN
    _, *found = statistics(logits, labels)
    logits[6] = NAN
    weights = torch.randn(2, 7).index_fill(1, torch.tensor([6]), 0.0)
    weights[1, 4] = NAN

    def gradient(*options: torch.dtype) -> tuple[Tensor, Tensor]:
        memory = torch.full((7, columns + 5), 7.0)
        backward_(*weights, memory[:, :columns].copy_(logits), labels, *found, 0, 0.5, None, *options)
        return memory[:, :columns], memory[:, columns:]

    (wide, _), (narrow, between) = gradient(), gradient(dtype)
    assert wide[4:6].isnan().all()
    assert not wide[6].any()
    assert_identical(narrow.view(dtype)[:, :columns], wide.to(dtype))
    assert (between == 7).all()


@contextmanager
def unwritten(*tensors: Tensor) -> Iterator[None]:
    """Checks that neither the values of these tensors nor autograd's version counters change."""
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    yield
    for tensor, (copy, version) in zip(tensors, before, strict=True):
        assert_identical(tensor.detach(), copy)
        assert tensor._version == version


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def require_inductor() -> None:
    if " " in torch.__file__:
        pytest.skip("torch's Inductor gives the linker a path that ends at its first space")


def compiled_once(
    function: Callable, backend: str = "aot_eager", dynamic: bool | None = True, calls: int = 1
) -> Callable:
    """Compiles the whole function without a graph break. Only the first `calls` may compile; later ones raise."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    stances = chain(repeat("default", calls), repeat("fail_on_recompile"))

    def call(*args: object) -> object:
        with torch.compiler.set_stance(next(stances)):
            return compiled(*args)

    return call


# ---- logits ----------------------------------------------------------------------------------------------------------


def random_logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows like those of a model, in turn: spread out, with one token far above the rest, and far from 0."""
    logits = torch.randn(shape) * 3
    rows = logits.view(-1, shape[-1])
    rows[1::4, 0] += 30
    rows[2::4] += 1000
    rows[3::4] -= 1000
    return logits.to(dtype)


def random_labels(*shape: int, vocabulary: int, generator: torch.Generator | None = None) -> Tensor:
    """Tokens; about one row in four has no label."""
    labels = torch.randint(vocabulary, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < 0.25, -100)


def whole_number_product(*rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """hidden [..., 16] and weight [vocabulary, 16] of small integers, weight divided by 8. Their product is exact, so
    the logits are the same however it is divided into tiles."""
    hidden, weight = torch.randint(-2, 3, (*rows, 16)), torch.randint(-2, 3, (vocabulary, 16))
    return hidden.to(dtype), weight.to(dtype) / 8


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def ratio_results(device: str = "cpu") -> tuple[Tensor, ...]:
    """Values and gradients of every form of ratio, entropy groups and clip ranges. Some tokens are NaN or infinite."""
    generator = random_generator(11)
    old = -5 * torch.rand(30, 700, generator=generator)
    logprob = old + torch.randn(30, 700, generator=generator) ** 3
    logprob[3, 5], logprob[4, 6], old[5, 7] = NAN, INF, INF
    mask = torch.rand(30, 700, generator=generator) < 0.8
    leaf, old, mask = logprob.to(device).requires_grad_(), old.to(device), mask.to(device)
    entropy = old.abs()
    tenths = tuple(i / 10 for i in range(1, 10))  # ten groups: two more than csrc/cuda/ratios.cu has words for
    groups = d3s_kernels.entropy_groups(entropy, mask, tenths)
    results = [groups, d3s_kernels.adaptive_clip(entropy, groups, vocab_size=1000)]
    for level in ("token", "sequence", "entropy_group"):
        for denominator in ("self", "old"):
            ratio = d3s_kernels.importance_ratio(
                leaf, old, mask, level=level, groups=groups if level == "entropy_group" else None,
                denominator=denominator,
            )  # fmt: skip
            results += [ratio.detach(), *torch.autograd.grad(ratio, leaf, entropy)]
    return tuple(result.cpu() for result in results)


def groups_of(entropy: Tensor, mask: Tensor, quantiles: tuple[float, ...]) -> list[list[int]]:
    """The positions of one sequence's tokens in each of its groups. Empty groups are left out."""
    above = [d3s_kernels.topk_mask(entropy, 1 - quantile, mask=mask).tolist() for quantile in quantiles]
    members: dict[int, list[int]] = {}
    for t in mask.nonzero().flatten().tolist():
        members.setdefault(sum(cut[t] for cut in above), []).append(t)
    return list(members.values())


# ---- segments --------------------------------------------------------------------------------------------------------


def cut(total: int, segments: int) -> Tensor:
    """Offsets that divide `total` into `segments` random pieces, some of them empty."""
    inner = torch.randint(total + 1, (segments - 1,)).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([total])])
