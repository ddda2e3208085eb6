"""The tests to run first on a GPU. Each says what a failure would mean. They take the back-end that serves the GPU;
tests/cuda/sanitized.py runs the narrow gradient under racecheck.

D3S_TEST_DEVICE=cpu pytest tests/cuda/test_first_minute.py compares the CPU's kernels with themselves, and shows that
the tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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


def scores_of_a_kind(kind: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(shape, generator=generator)
    return {
        "random": lambda: drawn,
        "all equal": lambda: torch.full(shape, 0.7),
        "denormal": lambda: drawn * 1e-40,
        "NaN": lambda: drawn.masked_fill(torch.rand(shape, generator=generator) < 0.4, torch.nan),
        "both zeros": lambda: torch.where(drawn > 0.5, 0.0, -0.0),
    }[kind]()


@pytest.mark.parametrize("kind", ["random", "all equal", "denormal", "NaN", "both zeros"])
@pytest.mark.parametrize("length", [2048, 8192, 8193, 55_984, 55_985])
def test_top_k_has_the_bits_of_the_cpu_every_time(length: int, kind: str) -> None:
    """A failure at one length: the limit of shared memory is elsewhere. Bits that change: a race. A kind: its keys."""
    advantages = torch.tensor([0.5, -2.0, 1.0])
    for shift in (0, 1):  # a slice from 1 is misaligned
        scores = scores_of_a_kind(kind, 3 * length + shift)[shift:].view(3, length)
        moved = scores_of_a_kind(kind, 3 * length + shift).to(GPU)[shift:].view(3, length)

        def both(scores: Tensor) -> tuple[Tensor, ...]:
            given = advantages.to(scores.device)
            chosen = d3s.select_tokens(scores, given, 0.2, scope="sequence", drop_zeros=True)
            return d3s.topk_mask(scores, 0.1), chosen.mask, chosen.count, chosen.threshold

        expected = both(scores)
        there = [part.to(GPU) for part in expected]
        different = torch.zeros(4, dtype=torch.int64, device=GPU)  # looked at once, so that calls follow each other
        for _ in range(size(50, 2)):
            for place, (ours, theirs) in enumerate(zip(both(moved), there, strict=True)):
                different[place] += (ours != theirs).sum()
        assert different.tolist() == [0] * 4, f"topk_mask, mask, count, threshold differ in {different.tolist()} places"


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


def narrow_and_wide(rows: int, columns: int = 20_803, padded: int = 20_864) -> tuple[Tensor, Tensor]:
    """The gradient in bfloat16 over its own float32 logits, and the float32 gradient rounded."""
    room = torch.zeros(rows, padded, device=GPU)
    logits = room[:, :columns]
    logits.copy_(logits_like_a_models(rows, columns, dtype=torch.float32))
    labels = torch.tensor([0, 1, 4095, 4096, columns - 1], device=GPU).repeat(-(-rows // 5))[:rows]
    _, *found = OP.logprob_entropy(logits, labels)
    given = torch.linspace(-1, 1, rows, device=GPU), torch.linspace(1, 2, rows, device=GPU)
    narrow, wide = room.clone(), room.clone()
    OP.logprob_entropy_backward_(*given, wide[:, :columns], labels, *found, 0)
    OP.logprob_entropy_backward_(*given, narrow[:, :columns], labels, *found, 0, grad_dtype=torch.bfloat16)
    return narrow.view(torch.bfloat16)[:, :columns], wide[:, :columns].bfloat16()


@pytest.mark.parametrize("rows", [5, size(2000, 10)])
def test_a_narrow_gradient_over_its_own_logits(rows: int) -> None:
    """A failure: a gradient in half precision overtakes the read of the logits that it lies over."""
    for _ in range(size(10, 1)):
        narrow, wide = narrow_and_wide(rows)
        assert_same_bits(narrow, wide)
