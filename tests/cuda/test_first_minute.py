"""The tests to run first on a GPU. Each says what a failure would mean. They take the back-end that serves the GPU;
tests/cuda/sanitized.py runs the narrow gradient under racecheck.

D3S_TEST_DEVICE=cpu pytest tests/cuda/test_first_minute.py compares the CPU's kernels with themselves, and shows that
the tests run.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from every_op import GPU, logits_like_a_models, nothing_waits, size
from helpers import assert_same, assert_same_bits
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference

OP = torch.ops.d3s_kernels
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("D3S_KERNELS_CHECK", raising=False)


def in_a_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "D3S_KERNELS_BACKEND"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)


FIRST_IN_A_GRAPH = """
import sys
from contextlib import nullcontext
import torch
import d3s_kernels as d3s

device = sys.argv[1]
scores = torch.randn(30_000, device=device)
values = torch.randint(0, 50, (65_536,), device=device).float()
capture, replay = nullcontext(), lambda: None
if device == "cuda":
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    capture, replay = torch.cuda.graph(graph, stream=torch.cuda.Stream()), graph.replay
with capture:
    captured = d3s.topk_mask(scores, 0.1), d3s.max_variance_select(values, 1000)
for _ in range(2):
    if device == "cuda":
        for mask in captured:
            mask.zero_()
    replay()
    eager = d3s.topk_mask(scores, 0.1), d3s.max_variance_select(values, 1000)
    for name, ours, theirs in zip(("topk_mask", "max_variance_select"), captured, eager):
        assert torch.equal(ours, theirs), f"{name}: {int((ours != theirs).sum())} places differ"
print("the same")
"""


def test_the_first_op_of_a_process_is_captured() -> None:
    """A failure: kernels that are loaded late, `cudaFuncSetAttribute`, `cudaHostAlloc` or CUB break a capture."""
    done = in_a_process(FIRST_IN_A_GRAPH, GPU.type)
    assert done.stdout.endswith("the same\n"), done.stdout + done.stderr[-3000:]


A_GPU_WITHOUT_CODE = """
import os
import torch
import d3s_kernels as d3s
from d3s_kernels._dispatch import libraries

assert not torch.cuda.is_initialized()  # by the import
pid = os.fork()
if pid == 0:
    torch.ones(1, device="cuda")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0, "the fork cannot use CUDA"
assert d3s.backends()["topk_mask"]["cuda"] == "cuda"
libraries.build_info = lambda: {"cuda_architectures": "990-real"}
scores = torch.arange(9.0, device="cuda")
assert d3s.backends()["topk_mask"]["cuda"] in ("triton", "torch")
print(d3s.topk_mask(scores, k=2).tolist()[5:])
"""


@pytest.mark.on_gpu_only
def test_a_gpu_without_code() -> None:
    """A failure: the import initialises CUDA, or a GPU gets kernels that it cannot run."""
    done = in_a_process(A_GPU_WITHOUT_CODE)
    assert done.stdout == "[False, False, True, True]\n", done.stdout + done.stderr[-3000:]
    assert "the CUDA library has no code for cuda:0, " in done.stderr
    assert done.stderr.count("python -m d3s_kernels says more") == 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("max_rows", [None, 40, 64, 100])
def test_the_head_waits_for_nothing(max_rows: int | None, masked: bool) -> None:
    """A failure: with a sampling mask, a bound on rows takes the host to the device or back, and breaks a graph."""
    generator = torch.Generator().manual_seed(2)
    spans = [torch.randperm(1000, generator=generator)[: 2 + row % 40] for row in range(64)]
    lists = d3s.SamplingMask.from_lists([span.tolist() for span in spans])
    kept = d3s.SamplingMask(lists.token_ids.to(GPU), lists.offsets.to(GPU))
    labels = torch.stack([span[0] for span in spans]).to(GPU)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(GPU).requires_grad_() for n in (64, 1000))
    counted = torch.ones(64, dtype=torch.bool, device=GPU) if masked else None
    ones = torch.ones(64, device=GPU)

    def both_ways() -> tuple[Tensor, ...]:
        given = {"sampling_mask": kept, "mask": counted, "max_rows": max_rows, "max_grad_rows": 64}
        found = d3s.linear_logprob_entropy(hidden, weight, labels, max_dense_rows=0, **given)
        return *(part.detach() for part in found), *torch.autograd.grad(found, (hidden, weight), (ones, ones))

    first = both_ways()
    with nothing_waits():
        again = both_ways()
    assert_same(again, first)
    exact_head = (part.detach().double().cpu() for part in (hidden, weight))
    exact = reference.linear_logprob_entropy(*exact_head, labels.cpu(), sampling_mask=lists)
    exceeded = max_rows == 40  # of 64
    for ours, theirs in zip(again, exact, strict=False):
        assert ours.isnan().all() if exceeded else torch.allclose(ours.cpu().double(), theirs, atol=1e-4)


# Both sides of each length at which another kernel of topk_mask.cu takes a row: one warp with fewer or more registers,
# 2, 4 or 8 warps, a block, and pieces. A row that begins at any place of a vector changes three places earlier.
LENGTHS = (1, 509, 512, 513, 1021, 1024, 1025, 2045, 2048, 2049, 4093, 4096, 4097, 8189, 8190, 8192, 8193)
LENGTHS += (55_984, 55_985)
Call = Callable[..., Tensor | tuple[Tensor, ...]]


def rows_of_all_kinds(length: int) -> Tensor:
    """Rows of random, equal and denormal scores, with NaN, both zeros, -inf, and scores that are one step apart."""
    drawn = torch.randn(length)
    return torch.stack(
        [
            drawn,
            torch.full((length,), 0.7),
            drawn * 1e-40,
            drawn.masked_fill(torch.rand(length) < 0.4, torch.nan),
            torch.where(drawn > 0.5, 0.0, -0.0),
            torch.where(drawn > 0.5, -torch.inf, torch.nan),
            1 + torch.randperm(length) * 2**-23,
        ]
    )


def placed(values: Tensor, shift: int) -> Tensor:
    """A copy on the GPU, `shift` elements from the beginning of the memory."""
    room = torch.empty(values.numel() + shift, dtype=values.dtype, device=GPU)
    return room[shift:].view(values.shape).copy_(values)


class Comparison:
    """The results of calls on the GPU and on the CPU. What differs is read once, so that calls follow each other."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.differ: list[Tensor] = []

    def add(self, name: str, call: Call, there: tuple[Tensor | None, ...], here: tuple[Tensor | None, ...]) -> None:
        both = ((found,) if isinstance(found, Tensor) else found for found in (call(*there), call(*here)))
        for place, (ours, theirs) in enumerate(zip(*both, strict=True)):
            wanted = theirs.to(GPU)
            self.differ.append(((ours != wanted) & ~(ours.isnan() & wanted.isnan())).sum())
            self.names.append(f"{name}: result {place}")

    def assert_same(self) -> None:
        counts = torch.stack(self.differ).tolist()
        wrong = [f"{name} differs in {n} places" for name, n in zip(self.names, counts, strict=True) if n]
        assert not wrong, f"{len(wrong)} of {len(counts)}: " + "; ".join(wrong[:9])


def selected(scores: Tensor, advantages: Tensor, mask: Tensor | None, drop_zeros: bool = True) -> tuple[Tensor, ...]:
    kept = d3s.select_tokens(scores, advantages, 0.2, mask=mask, scope="sequence", drop_zeros=drop_zeros)
    return kept.mask, kept.count, kept.threshold


@pytest.mark.parametrize("length", LENGTHS)
def test_top_k_has_the_bits_of_the_cpu(length: int) -> None:
    """A failure at one length: the kernel that holds rows of this length, or the limit of shared memory is elsewhere. A
    failure at some shifts: how a row begins. At one k: how -inf, NaN and padding are counted.
    """
    found = Comparison()
    for shift, dtype in itertools.product(range(4), (torch.float32, torch.bfloat16)):
        every = rows_of_all_kinds(length).roll(shift, 0).to(dtype)
        many = (size(4096, 9),) if length <= 1024 and shift == 0 else ()
        for rows in (1, 3, 4, 5, *many):
            scores, advantages = every.repeat(-(-rows // 7), 1)[:rows], torch.linspace(-2, 2, rows)
            for mask in (None, torch.rand(rows, length) < 0.7):
                there = placed(scores, shift), None if mask is None else placed(mask, rows % 4)
                counted = ~scores.isnan() if mask is None else mask & ~scores.isnan()
                present = set(counted[:7].sum(1).tolist())
                name = f"{rows} rows from {shift}, {dtype}, {'no ' if mask is None else ''}mask"
                for k in {1, length // 2, *present, *(n - 1 for n in present)} - {0, -1}:
                    call = partial(lambda scores, mask, k: d3s.topk_mask(scores, k=k, mask=mask), k=k)
                    found.add(f"topk_mask, {name}, k = {k}", call, there, (scores, mask))
                for drop in (False, True):
                    given = there[0], advantages.to(GPU), there[1]
                    call = partial(selected, drop_zeros=drop)
                    found.add(f"select_tokens, {name}", call, given, (scores, advantages, mask))
    found.assert_same()


@pytest.mark.parametrize("length", LENGTHS)
def test_top_k_has_the_bits_of_the_cpu_every_time(length: int) -> None:
    """A failure: a race, or a read of memory that another kernel has left. The rows fill the GPU."""
    scores, advantages = rows_of_all_kinds(length), torch.linspace(-2, 2, 7)
    times = max(1, min(size(4096, 7), size(1 << 22, 1) // length) // 7)
    expected = [part.to(GPU) for part in (d3s.topk_mask(scores, 0.1), *selected(scores, advantages, None))]
    expected = [part.repeat(times, *[1] * (part.dim() - 1)) for part in expected]
    moved, weights = scores.to(GPU).repeat(times, 1), advantages.to(GPU).repeat(times)
    different = torch.zeros(len(expected), dtype=torch.int64, device=GPU)
    for _ in range(size(50, 2)):
        d3s.importance_ratio(moved, moved, level="sequence")  # leaves its own numbers in shared memory
        ours = d3s.topk_mask(moved, 0.1), *selected(moved, weights, None)
        different += torch.stack([(one != other).sum() for one, other in zip(ours, expected, strict=True)])
    assert different.tolist() == [0] * 4, f"topk_mask, mask, count, threshold differ in {different.tolist()} places"


@pytest.mark.parametrize("length", [4097, 4353, 8192, 65_535, 65_536, 65_537])
def test_a_pool_has_the_bits_of_the_cpu(length: int) -> None:
    """A failure at one length: the sort of pools of this length; from 65,537 on, that of CUB."""
    found = Comparison()
    drawn = torch.randn(length)
    kinds = {
        "random": drawn,
        "50 values": torch.randint(0, 50, (length,)).float(),
        "all equal": torch.full((length,), 0.7),
        "NaN": drawn.masked_fill(torch.rand(length) < 0.4, torch.nan),
    }
    for shift, (kind, values) in enumerate(kinds.items()):
        for keep in (1, 1000, length // 2, length - 1):
            call = partial(d3s.max_variance_select, keep=keep)
            found.add(f"{kind}, {keep} kept", call, (placed(values, shift),), (values,))
    found.assert_same()


# One to eight warps take a row, but two launches take a few long rows.
SHAPES = [(5, length) for length in range(1021, 8190, 1024)]
SHAPES += [(2, 8192), (3, 7169), (2, 20_001), (size(128, 129), size(8193, 70))]


def ratios(
    logprob: Tensor, old: Tensor, mask: Tensor | None, groups: Tensor, offsets: Tensor | None
) -> tuple[Tensor, ...]:
    given = {"mask": mask, "offsets": offsets}
    return (
        *(
            d3s.importance_ratio(logprob, old, level=level, groups=ids, denominator=denominator, **given)
            for level, ids in (("sequence", None), ("entropy_group", groups))
            for denominator in ("self", "old")
        ),
        d3s.adaptive_clip(logprob.abs(), groups, vocab_size=1000, **given),
    )


@pytest.mark.parametrize("groups", [2, 8, 16])
@pytest.mark.parametrize(("rows", "length"), SHAPES)
def test_ratios_of_rows_have_the_bits_of_the_cpu(rows: int, length: int, groups: int) -> None:
    """A failure with 16 groups alone: the atomic additions from the ninth group on. With packed rows alone: the two
    launches of ragged sequences. Some terms are NaN, infinite or too large to add, and all padding is NaN.
    """
    lengths = torch.randint(length // 2, length + 1, (rows, 1))
    mask = torch.arange(length) < lengths
    old, ids = -5 * torch.rand(rows, length), torch.randint(-1, groups, (rows, length), dtype=torch.int8)
    logprob = old + torch.randn(rows, length) ** 3
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf, 5e3)):
        logprob[row % rows, torch.randint(length, (groups,))] = bad
    logprob[~mask] = torch.nan
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.flatten().cumsum(0)])
    cases = {
        "padded": (logprob, old, mask, ids, None),
        "packed": (logprob[mask], old[mask], None, ids[mask], offsets),
    }
    found = Comparison()
    for shift, (name, here) in itertools.product((0, 1), cases.items()):
        there = tuple(part if part is None else placed(part, shift) for part in here)
        found.add(f"{name}, from {shift}", ratios, there, here)
    found.assert_same()


@pytest.mark.parametrize("kind", ["close", "16 values", "all equal"])
@pytest.mark.parametrize("segments", [1, 512])
def test_ties_across_pieces(segments: int, kind: str) -> None:
    """A failure: the order of ties between pieces, or the last block of a segment sees counts too early."""
    n, generator = size(4 << 20, 1 << 16), torch.Generator().manual_seed(4)
    drawn = torch.rand(n, generator=generator)
    scores = {"close": 1 + drawn / 4, "16 values": (drawn * 16).floor(), "all equal": torch.ones(n)}[kind].to(GPU)
    cuts = torch.randint(n + 1, (segments - 1,), generator=generator).sort().values
    offsets = torch.tensor([0, *cuts.tolist(), n], device=GPU)
    lengths = offsets.diff()
    order = scores.sort(descending=True, stable=True).indices
    of = torch.arange(segments, device=GPU).repeat_interleave(lengths)
    order = order[of[order].sort(stable=True).indices]  # by segment, and there from the highest
    kept = torch.arange(n, device=GPU) - offsets[of] < (lengths[of] + 7) // 8
    expected = torch.zeros(n, dtype=torch.bool, device=GPU)
    expected[order[kept]] = True
    for _ in range(size(20, 1)):
        found = d3s.topk_mask(scores, 0.125) if segments == 1 else d3s.topk_mask(scores, 0.125, offsets=offsets)
        assert torch.equal(found, expected), f"{int((found != expected).sum())} places differ"


def test_the_entropy_of_one_logit_above_equal_others(record_property: Callable) -> None:
    """Some 2e-6 nats are expected. Above 1e-5: `ex2.approx` is biased; the emulation's exponential is exact."""
    vocabulary, worst = size(50_257, 1001), 0.0
    for distance in torch.linspace(0.01, 40, size(4000, 400), device=GPU).split(500):
        logits = -distance.unsqueeze(1).repeat(1, vocabulary)
        logits[:, 77] = 0
        d = distance.double()
        others = (vocabulary - 1) * (-d).exp()
        exact = (1 + others).log() + others * d / (1 + others)
        worst = max(worst, float((d3s.entropy(logits).double() - exact).abs().max()))
    record_property("layer", f"entropy of one logit above equal others: at most {worst:.2g} nats from float64")
    assert worst <= 1e-5


def narrow_and_wide(rows: int, columns: int = 20_803) -> tuple[Tensor, Tensor]:
    """The gradient in bfloat16 over its own float32 logits, and the float32 gradient rounded."""
    room = torch.zeros(rows, columns + 61, device=GPU)
    logits = room[:, :columns]
    logits.copy_(logits_like_a_models(rows, columns, dtype=torch.float32))
    labels = torch.tensor([0, 1, 4095, 4096, columns - 1], device=GPU).repeat(-(-rows // 5))[:rows]
    _, *found = OP.logprob_entropy(logits, labels)
    given = torch.linspace(-1, 1, rows, device=GPU), torch.linspace(1, 2, rows, device=GPU)
    narrow, wide = room.clone(), room.clone()
    OP.logprob_entropy_backward_(*given, wide[:, :columns], labels, *found, 0)
    OP.logprob_entropy_backward_(*given, narrow[:, :columns], labels, *found, 0, grad_dtype=torch.bfloat16)
    return narrow.view(torch.bfloat16)[:, :columns], wide[:, :columns].bfloat16()


# The longer rows have all barriers of a row of 151,936 logits.
@pytest.mark.parametrize(("rows", "columns"), [(5, 151_875), (size(2000, 10), 20_803)])
def test_a_narrow_gradient_over_its_own_logits(rows: int, columns: int) -> None:
    """A failure: a gradient in half precision overtakes the read of the logits that it lies over."""
    for _ in range(size(10, 1)):
        narrow, wide = narrow_and_wide(rows, columns)
        assert_same_bits(narrow, wide)
