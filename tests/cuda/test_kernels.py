"""Each back-end on GPU tensors: full sizes, repeatability, graphs, streams, no host synchronisation, torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from every_op import GPU, call, logits_like_a_models, names, nothing_waits, size
from helpers import (
    assert_entropy,
    assert_gradient,
    assert_identical,
    assert_logprob,
    assert_same,
    assert_same_bits,
    random_labels,
    ratio_results,
)
from test_first_minute import Comparison, rows_of_all_kinds, selected
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference

VOCABULARY = size(151_936, 1000)

pytestmark = pytest.mark.usefixtures("backend")
on_one_back_end = pytest.mark.parametrize("backend", ["cuda"], indirect=True)  # torch.compile takes half a minute


@pytest.mark.parametrize("name", names())
def test_the_same_bits_every_time(name: str) -> None:
    run = call(name)
    first = [tensor.clone() for tensor in run()]
    for _ in range(size(20, 1)):
        assert_same(run(), first)


@pytest.mark.on_gpu_only
@pytest.mark.parametrize("name", names())
def test_nothing_waits_for_the_gpu(name: str) -> None:
    run = call(name)
    run()
    with nothing_waits():
        run()


@pytest.mark.on_gpu_only
@pytest.mark.parametrize("name", names())
def test_in_a_graph(name: str) -> None:
    run = call(name)
    expected = [tensor.clone() for tensor in run()]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # also on a stream other than the default one
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert_same(captured, expected)


@pytest.mark.on_gpu_only
def test_on_the_current_stream() -> None:
    """An op runs after the work that is already queued on the current stream, without a device synchronisation."""
    stream = torch.cuda.Stream()
    scores = torch.zeros(1 << 20, device=GPU)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        scores += torch.arange(1 << 20, device=GPU)
        mask = d3s.topk_mask(scores, k=10)
    stream.synchronize()
    assert mask.nonzero().flatten().tolist() == list(range((1 << 20) - 10, 1 << 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 100, size(2000, 300)])
def test_full_vocabulary(rows: int, dtype: torch.dtype) -> None:
    logits = logits_like_a_models(rows, VOCABULARY, dtype=dtype).requires_grad_()
    labels = random_labels(rows, vocabulary=VOCABULARY).to(GPU)
    logprob, entropy = d3s.logprob_entropy(logits, labels)
    g_logprob, g_entropy = torch.randn(rows, device=GPU), torch.randn(rows, device=GPU)
    (ours,) = torch.autograd.grad((logprob * g_logprob + entropy * g_entropy).sum(), logits)
    for part in range(0, rows, 200):  # in pieces, because float64 copies of all rows would fill the memory
        piece = slice(part, part + 200)
        exact_logits = logits.detach()[piece].double().requires_grad_()
        exact = reference.logprob_entropy(exact_logits, labels[piece])
        assert_logprob(logprob[piece], exact[0])
        assert_entropy(entropy[piece], exact[1])
        (theirs,) = torch.autograd.grad((exact[0] * g_logprob[piece] + exact[1] * g_entropy[piece]).sum(), exact_logits)
        assert_gradient(ours[piece], theirs, floor=1e-5 if dtype == torch.float16 else 0.0)  # float16 ends at 6e-8


@pytest.mark.parametrize("backend", ["cuda", "triton"], indirect=True)  # plain PyTorch works on blocks of rows
def test_more_than_2_to_the_31_elements() -> None:
    logits = torch.zeros(size(16_000, 16), VOCABULARY, device=GPU, dtype=torch.bfloat16)
    logits[-1] = logits_like_a_models(VOCABULARY)
    entropy = d3s.entropy(logits)
    assert_entropy(entropy[-1:], reference.entropy(logits[-1:]))
    torch.testing.assert_close(entropy[:-1], torch.full_like(entropy[:-1], float(torch.log(torch.tensor(VOCABULARY)))))


# Both sides of sizes at which Triton's kernel takes more registers; most are no multiple of 16.
@pytest.mark.parametrize("length", [509, 1021, 2045, 4093, 7000, 8189, 8208, 15_001])
def test_top_k_of_rows_in_registers(length: int) -> None:
    found = Comparison()
    for dtype in (torch.float32, torch.bfloat16):
        scores, weights = rows_of_all_kinds(length).to(dtype), torch.linspace(-2, 2, 7)
        for mask in (None, torch.rand(7, length) < 0.7):
            here = scores, weights, mask
            there = tuple(part if part is None else part.to(GPU) for part in here)
            found.add(f"{dtype}, {'no ' if mask is None else ''}mask", selected, there, here)
    found.assert_same()


def test_max_variance_of_a_pool() -> None:
    for n in (65_536, size(1 << 20, 70_000)):
        values = torch.randint(0, 50, (n,)).float()
        ours = d3s.max_variance_select(values.to(GPU), n // 4)
        assert_identical(ours.cpu(), reference.max_variance_select(values, n // 4))


def test_ratios_are_those_of_the_cpu() -> None:
    """To the bit; only the NaN of a GPU has bits of its own."""
    for here, there in zip(ratio_results("cpu"), ratio_results(GPU.type), strict=True):
        assert_identical(there, here)


def test_half_precision_heads() -> None:
    rows, vocabulary = size(500, 50), size(50_000, 5000)
    hidden, weight = (torch.randn(n, 256, device=GPU).bfloat16() for n in (rows, vocabulary))
    labels = random_labels(rows, vocabulary=vocabulary).to(GPU)
    leaves = hidden.requires_grad_(), (weight / 8).requires_grad_()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours = d3s.linear_logprob_entropy(*leaves, labels, workspace_bytes=size(40_000_000, 400_000))
    theirs = reference.linear_logprob_entropy(*exact, labels)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right.float(), atol=1e-4, rtol=1e-5)
    gradients = (torch.autograd.grad(sum(of).sum(), given) for of, given in ((ours, leaves), (theirs, exact)))
    for mine, right in zip(*gradients, strict=True):
        assert (mine.double() - right).norm() <= 2e-2 * right.norm()


def test_a_gradient_that_is_added_leaves_the_other_one_its_bits() -> None:
    hidden, weight = (torch.randn(n, 64, device=GPU).bfloat16().requires_grad_() for n in (300, 5000))
    labels = random_labels(300, vocabulary=5000).to(GPU)
    into = torch.zeros(5000, 64, device=GPU)
    added = d3s.linear_logprob_entropy(hidden, weight, labels, weight_grad_into=into)
    (ours,) = torch.autograd.grad(sum(added).sum(), hidden)
    whole = d3s.linear_logprob_entropy(hidden, weight, labels)
    plain, of_weight = torch.autograd.grad(sum(whole).sum(), (hidden, weight))
    assert_same_bits(ours, plain)
    assert (into - of_weight).norm() <= 1e-2 * of_weight.norm()


def kept_loss(logits: Tensor, labels: Tensor, advantages: Tensor, ratio: Tensor) -> Tensor:
    logprob, entropy = d3s.logprob_entropy(logits, labels)
    kept = d3s.select_tokens(entropy.detach(), advantages, ratio)
    return (torch.where(kept.mask, logprob, logprob.detach()) * advantages.unsqueeze(-1)).sum()


def arguments_of_a_step(tokens: int, ratio: float) -> tuple[Tensor, ...]:
    logits = logits_like_a_models(4, tokens, 1000).requires_grad_()
    labels = random_labels(4, tokens, vocabulary=1000).to(GPU)
    return logits, labels, torch.randn(4, device=GPU), torch.tensor(ratio, device=GPU)


def assert_same_gradient(compiled: Callable[..., Tensor], logits: Tensor, *rest: Tensor) -> None:
    (ours,) = torch.autograd.grad(compiled(logits, *rest), logits)
    (eager,) = torch.autograd.grad(kept_loss(logits, *rest), logits)
    torch.testing.assert_close(ours, eager)


@pytest.mark.on_gpu_only
@on_one_back_end
def test_compiled_in_one_graph() -> None:
    compiled = torch.compile(kept_loss, fullgraph=True, dynamic=True)
    for tokens in (16, 32, 48):
        assert_same_gradient(compiled, *arguments_of_a_step(tokens, 0.2))


@pytest.mark.on_gpu_only
@on_one_back_end
def test_compiled_into_cuda_graphs() -> None:
    """Forward and backward are each recorded as a CUDA graph and replayed on changing numbers; none is skipped."""
    # Imported here: without a GPU, each run of the tests would wait seconds for torch's compiler.
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    counters["inductor"].clear()
    compiled = torch.compile(kept_loss, fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_gradient(compiled, *arguments_of_a_step(16, 0.1 + 0.2 * step))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    logits = torch.randn(4, 5000, device="cuda:1")
    assert_entropy(d3s.entropy(logits), reference.entropy(logits))
    assert torch.cuda.current_device() == 0
