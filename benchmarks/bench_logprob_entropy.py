"""logprob_entropy and entropy: forward and backward, of all rows and with half of the rows masked."""

from collections.abc import Callable

import pytest
import torch

import d3s_kernels as d3s

from . import inputs, peers
from .clock import Prepared, Work
from .harness import Contest, close, close_gradient, describe
from .sizes import Sizes
from .targets import AS_MANY, HALF_A_COPY, OPERATIONS

LOW_PRECISION_GRADIENT = {"TRL": 0.05, "TRL without Triton": 0.05, "verl": 0.05}
LOW_PRECISION = {"TRL": 0.5, "TRL without Triton": 0.5, "verl": 0.5}  # these peers round to bfloat16 early


@pytest.fixture(scope="module")
def logits(sizes: Sizes) -> torch.Tensor:
    return inputs.logits_and_labels(sizes)[0]


@pytest.fixture(scope="module")
def labels(sizes: Sizes) -> torch.Tensor:
    return inputs.logits_and_labels(sizes)[1]


@pytest.fixture(scope="module")
def compiled() -> Callable | None:
    """The compiled peer. None on a GPU: there `test_compiled` times it, since compiling takes many seconds."""
    return None if peers.ON_GPU else peers.compiled(peers.shifted)


@pytest.fixture(scope="module")
def size(logits: torch.Tensor) -> str:
    return describe(*logits.shape, dtype=logits.dtype)


def test_forward(contest: Contest, logits, labels, compiled, size) -> None:
    as_floats = logits.view(torch.float32)  # the same bytes, for a sum that does not convert them
    product = None if peers.ON_GPU else as_many_operations(logits.numel())
    contest(
        "logprob_entropy forward",
        size,
        lambda: d3s.logprob_entropy(logits, labels),
        peers={
            peers.TRL: peers.from_trl(lambda: peers.trl_grpo(logits, labels)),
            "verl": peers.looping(lambda: peers.verl(logits, labels)),
            "PyTorch": lambda: peers.plain(logits, labels),
            "torch.compile": compiled and (lambda: compiled(logits, labels)),
        },
        yardsticks={
            "logits.sum()": lambda: logits.sum(),
            "read": lambda: as_floats.sum(),
            HALF_A_COPY: half_a_copy(logits) if peers.ON_GPU else None,
            AS_MANY: product,
        },
        agree=close(1e-3, **LOW_PRECISION),
    )


def half_a_copy(logits: torch.Tensor) -> Work:
    """A copy of half of the logits. The bytes that it reads and the bytes that it writes are together as many as all
    logits have. This copy is a second yardstick, because torch's sum does not always read as fast as the memory allows.
    """
    source = logits.flatten()[: logits.numel() // 2]
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def as_many_operations(elements: int) -> Work:
    """A float32 matrix product with as many vector operations as our forward. Such a product is known to keep a CPU's
    units busy.
    """
    width, columns = 1_536, 1_024
    rows = max(1, round(OPERATIONS * elements / (width * columns)))
    left, right = torch.ones(rows, width), torch.ones(width, columns)
    return lambda: left @ right


def test_entropy(contest: Contest, logits, size) -> None:
    contest(
        "entropy",
        size,
        lambda: d3s.entropy(logits),
        peers={peers.TRL: peers.from_trl(lambda: peers.trl_entropy(logits))},
        yardsticks={"logits.sum()": lambda: logits.sum()},
        agree=close(1e-3, **LOW_PRECISION),
    )


def test_backward(contest: Contest, logits, labels, compiled, size) -> None:
    gradients = inputs.advantages(*labels.shape), inputs.entropies(*labels.shape)

    def of(function: Callable) -> Work:
        return backward(function, logits, labels, *gradients)

    contest(
        "logprob_entropy backward, both gradients",
        size,
        of(d3s.logprob_entropy),
        peers={
            peers.TRL: peers.from_trl(of(peers.trl_entropy_bonus)),
            "verl": peers.looping(of(peers.verl)),
            "PyTorch": of(peers.plain),
            "torch.compile": compiled and of(compiled),
        },
        yardsticks={
            "copy": lambda: torch.empty_like(logits).copy_(logits),  # into memory from the same allocator
            "empty + fill_": lambda: torch.empty_like(logits).fill_(0),
        },
        agree=close_gradient(1e-2, **LOW_PRECISION_GRADIENT),
    )


@pytest.mark.skipif(not peers.ON_GPU, reason="on a CPU they are among the peers above")
def test_compiled(contest: Contest, logits, labels, size) -> None:
    """Times the peers that are slow to import or to compile. quack's function computes no entropy, so it is a yardstick
    and not a peer.
    """
    gradients = inputs.advantages(*labels.shape), inputs.entropies(*labels.shape)
    old, compiled = peers.trl_peers.torch_on_gpu(), peers.compiled(peers.shifted)
    rivals = {"TRL without Triton": old, "torch.compile": compiled}
    quack, less = peers.quack(), "quack's cross entropy, without an entropy"
    contest(
        "logprob_entropy forward, beside torch.compile",
        size,
        lambda: d3s.logprob_entropy(logits, labels),
        peers={name: peer and (lambda peer=peer: peer(logits, labels)) for name, peer in rivals.items()},
        yardsticks={less: quack and (lambda: peers.quack_logprob(logits, labels))},
        agree=close(1e-3, **LOW_PRECISION),
    )
    contest(
        "logprob_entropy backward, beside torch.compile",
        size,
        backward(d3s.logprob_entropy, logits, labels, *gradients),
        peers={name: peer and backward(peer, logits, labels, *gradients) for name, peer in rivals.items()},
        yardsticks={less: quack and backward(peers.quack_logprob, logits, labels, gradients[0])},
        agree=close_gradient(1e-2, **LOW_PRECISION_GRADIENT),
    )


def test_backward_of_logprob_alone(contest: Contest, logits, labels, size) -> None:
    gradient = inputs.advantages(*labels.shape)
    contest(
        "logprob_entropy backward, logprob alone",
        size,
        backward(d3s.logprob_entropy, logits, labels, gradient),
        peers={peers.TRL: peers.from_trl(backward(peers.trl_grpo, logits, labels, gradient))},
        yardsticks={"empty + fill_": lambda: torch.empty_like(logits).fill_(0)},
        agree=close_gradient(1e-2, TRL=0.05),
    )


@pytest.mark.parametrize("pattern", ["alternate", "right-padded"])
def test_half_masked(contest: Contest, logits, labels, size, pattern: str) -> None:
    mask = half(pattern, labels)
    contest(
        f"logprob_entropy forward, half of the rows masked ({pattern})",
        size,
        lambda: d3s.logprob_entropy(logits, labels, mask=mask),
        yardsticks={"all rows": lambda: d3s.logprob_entropy(logits, labels)},
    )


@pytest.mark.parametrize("pattern", ["alternate", "right-padded"])
def test_backward_half_masked(contest: Contest, logits, labels, size, pattern: str) -> None:
    mask = half(pattern, labels)
    gradients = inputs.advantages(*labels.shape), inputs.entropies(*labels.shape)

    def masked(leaf: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return d3s.logprob_entropy(leaf, labels, mask=mask)

    contest(
        f"logprob_entropy backward, half of the rows masked ({pattern})",
        size,
        backward(masked, logits, labels, *gradients),
        yardsticks={"all rows": backward(d3s.logprob_entropy, logits, labels, *gradients)},
    )


def half(pattern: str, labels: torch.Tensor) -> torch.Tensor:
    if pattern == "right-padded":
        return inputs.right_padded(*labels.shape)
    return (torch.arange(labels.numel(), device=labels.device) % 2 == 0).view_as(labels)


def backward(function: Callable, logits: torch.Tensor, labels: torch.Tensor, *gradients: torch.Tensor) -> Work:
    """Only the backward pass is timed. If only one gradient is given, it is the gradient of the log-probability."""
    leaf = logits.detach().requires_grad_()

    def forward() -> tuple[torch.Tensor, ...]:
        return function(leaf, labels)[: len(gradients)]

    def gradient(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        incoming = [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaf, incoming)[0]

    return Prepared(forward, gradient)


@pytest.mark.skipif(not peers.ON_GPU, reason="about the barriers of a GPU's kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_narrow_gradient(contest: Contest, sizes: Sizes, dtype: torch.dtype) -> None:
    """Gradients in half precision of float32 logits, as in the LM head: over the logits' own memory, or of kept logits.
    The contents of the logits change with each call, which changes no time.
    """
    rows, columns = sizes.head_tokens, sizes.vocabulary
    logits = torch.randn(rows, columns, device=inputs.device)
    labels = torch.randint(columns, (rows,), device=inputs.device)
    of_rows = (torch.rand(rows, device=inputs.device) for _ in range(5))
    grads, statistics = (next(of_rows), next(of_rows)), tuple(of_rows)
    every = torch.arange(rows, device=inputs.device)
    packed, front = torch.empty(rows, columns, dtype=dtype, device=inputs.device), logits.view(dtype)[:, :columns]
    op = torch.ops.d3s_kernels

    def in_place(grad_dtype: torch.dtype | None) -> Work:
        return lambda: op.logprob_entropy_backward_(*grads, logits, labels, *statistics, 0, grad_dtype=grad_dtype)

    contest(
        f"logprob_entropy backward of float32 logits in {str(dtype).removeprefix('torch.')}, in place",
        describe(rows, columns, dtype=logits.dtype),
        in_place(dtype),
        yardsticks={
            "float32 gradient": in_place(None),
            "of kept logits": lambda: op.logprob_entropy_backward_rows_(
                *grads, logits, labels, *statistics, every, packed, 0
            ),
            "cast to half": lambda: packed.copy_(logits),
            "copy to the front half": lambda: front.copy_(packed),
        },
    )
