"""linear_logprob_entropy: the LM head with log-probability and entropy, compared with the matrix product alone."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn.functional import linear

import d3s_kernels as d3s
from d3s_kernels._lm_head import forward, products, tiles
from d3s_kernels._lm_head.forward import HostNumber
from d3s_kernels._lm_head.problem import HeadProblem
from d3s_kernels._lm_head.tiles import SIZES, Tiles, whole_vectors

from . import inputs, peers
from .clock import Prepared, Work
from .harness import Contest, close, describe
from .sizes import Sizes
from .targets import BESIDE_UNSLOTH, HEAD_STEP, LIGER, LIGER_SHAPE, TORCHS_HEAD, UNSLOTH, computed_again, kept_logits

WIDTHS = ["narrow", "wide"]
LIGERS = 4_096, 131_072  # features and vocabulary for which Liger publishes times, with 4,096 rows
VERL_KERNEL = "verl's Triton kernel"
ALL_LOGITS = 1 << 40  # more bytes than all logits have
# The dtype of the inputs and the dtype of the logits. The first row is like a bfloat16 model; the second is the default
# for bfloat16 inputs.
PRECISIONS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, fp32 logits": (torch.bfloat16, torch.float32),
    "fp32": (torch.float32, torch.float32),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_forward(contest: Contest, sizes: Sizes, width: str, precision: str) -> None:
    dtype, logits_dtype = PRECISIONS[precision]
    hidden, weight, labels = inputs.lm_head(sizes, width, dtype)
    chunked = peers.trl_peers.CHUNKED and (width, precision) != ("wide", "bf16")
    yardsticks = {"matmul": lambda: linear(hidden, weight)}
    if peers.ON_GPU and dtype != logits_dtype:
        yardsticks["matmul to fp32"] = lambda: torch.mm(hidden, weight.T, out_dtype=logits_dtype)
    contest(
        f"linear_logprob_entropy forward, {width}, {precision}",
        size_of(hidden, weight),
        lambda: d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=logits_dtype),
        peers={
            "PyTorch": (lambda: peers.plain(linear(hidden, weight), labels)) if fast(width) else None,
            # TRL's head is not among the headlines, because its first call imports for seconds.
            "TRL's chunked head": chunked and (lambda: peers.trl_head(hidden, weight, labels)),
            LIGER: liger_for(width, precision) and (lambda: peers.liger_head(hidden, weight, labels)),
        },
        yardsticks=yardsticks | torchs(precision, lambda head: lambda: head(hidden, weight, labels)),
        agree=close(0.2 if dtype == torch.bfloat16 else 1e-3),  # PyTorch rounds the logits to the inputs' precision
    )


@pytest.mark.parametrize(
    ("width", "precision"), [("narrow", "bf16"), ("narrow", "bf16, fp32 logits"), ("wide", "bf16")]
)
def test_few_gradients(contest: Contest, sizes: Sizes, width: str, precision: str) -> None:
    dtype, logits_dtype = PRECISIONS[precision]
    hidden, weight, labels = inputs.lm_head(sizes, width, dtype)
    every = inputs.advantages(len(labels))
    few = every * (torch.arange(len(every), device=every.device) % 10 == 0)

    def step(function: Callable, gradient: torch.Tensor) -> Work:
        return step_of(function, hidden, weight, gradient)

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=logits_dtype)[0]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return peers.plain(linear(hidden, weight), labels)[0]

    contest(
        f"linear_logprob_entropy forward + backward, 10% of the tokens, {width}, {precision}",
        size_of(hidden, weight),
        step(ours, few),
        peers={
            "PyTorch": step(plain, few) if fast(width) else None,
            "TRL's chunked head": peers.trl_peers.CHUNKED and step(of_peer(peers.trl_head, labels), few),
            **(torchs(precision, lambda head: step(of_peer(head, labels), few)) if fast(width) else {}),
        },
        yardsticks={
            "all tokens": step(ours, every),
            f"{LIGER}, all tokens": liger_for(width, precision) and step(of_peer(peers.liger_head, labels), every),
        },
        agree=close_in_norm(0.02),
    )


@pytest.mark.skipif(not peers.ON_GPU, reason="about what keeps a GPU busy")
@pytest.mark.parametrize("bounded", [True, False], ids=["bound", "no bound"])
@pytest.mark.parametrize("width", WIDTHS)
def test_head_few(contest: Contest, sizes: Sizes, width: str, bounded: bool) -> None:
    """The changes for few rows, each with and without the others."""
    hidden, weight, labels = inputs.lm_head(sizes, width, torch.bfloat16)
    every = inputs.advantages(len(labels))
    few = every * (torch.arange(len(every), device=every.device) % 10 == 0)
    bound = {"max_grad_rows": len(few) // 10 + 1} if bounded else {}

    def step(gradient: torch.Tensor = few, **options: int) -> Work:
        def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype="auto", **options)[0]

        return step_of(ours, hidden, weight, gradient)

    yardsticks = {
        "in parts": in_parts(step(**bound)),
        "kept logits": step(**bound, keep_logits_bytes=ALL_LOGITS),
        "kept logits, in parts": in_parts(step(**bound, keep_logits_bytes=ALL_LOGITS)),
        "all tokens": step(every),
    }
    if bounded:
        yardsticks |= {f"in {parts} parts": in_parts(step(**bound), parts) for parts in (2, 4, 8, 16, 32)}
    contest(
        f"{HEAD_STEP}, few of the tokens, {width}, bf16{', bounded' if bounded else ''}",
        size_of(hidden, weight),
        step(**bound),
        yardsticks=yardsticks | ({} if bounded else {"the number is read first": read_first(step())}),
        agree=close_in_norm(0.02),
    )


@pytest.mark.parametrize("width", WIDTHS if peers.ON_GPU else ["narrow"])
@pytest.mark.parametrize(
    "keeps", [True] if peers.ON_GPU else [True, False], ids=lambda keeps: "kept" if keeps else "not"
)
def test_kept_logits(contest: Contest, sizes: Sizes, width: str, keeps: bool) -> None:
    """Logits that are not kept have a contest here only on a CPU; on a GPU it is the next test."""
    hidden, weight, labels = inputs.lm_head(sizes, width, torch.bfloat16)
    gradient = inputs.advantages(len(labels))
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)

    def step(function: Callable) -> Work:
        return step_of(function, hidden, weight, gradient)

    ours = step(every_row(labels, torch.bfloat16, keep_logits_bytes=ALL_LOGITS if keeps else 0))
    products_made = four_products if not keeps else three_products
    yardsticks = {"the products alone": lambda: products_made(hidden, weight, logits)}
    if peers.ON_GPU:
        yardsticks["in parts"] = in_parts(ours)
    contest(
        kept_logits(width) if keeps else computed_again(width),
        size_of(hidden, weight),
        ours,
        peers={
            LIGER: liger_for(width, "bf16") and step(of_peer(peers.liger_head, labels)),
            **torchs("bf16", lambda head: step(of_peer(head, labels))),
        },
        yardsticks=yardsticks,
        agree=close_in_norm(0.02),
    )


@pytest.mark.parametrize("precision", ["bf16", "bf16, fp32 logits"])
def test_every_gradient(contest: Contest, sizes: Sizes, precision: str) -> None:
    dtype, logits_dtype = PRECISIONS[precision]
    hidden, weight, labels = inputs.lm_head(sizes, "wide", dtype)
    gradient = inputs.advantages(len(labels))
    logits = torch.empty(len(hidden), len(weight), dtype=dtype, device=hidden.device)
    yardsticks = {"four products": lambda: four_products(hidden, weight, logits)}
    if peers.ON_GPU:
        yardsticks |= {"old cut": lambda: with_the_old_cut(ours), "in parts": lambda: in_parts(ours)()}

    ours = step_of(every_row(labels, logits_dtype), hidden, weight, gradient)

    def of_torch(head: Callable) -> Work:
        return step_of(of_peer(head, labels), hidden, weight, gradient)

    contest(
        f"linear_logprob_entropy forward + backward, wide, {precision}",
        size_of(hidden, weight),
        ours,
        peers={
            LIGER: step_of(of_peer(peers.liger_head, labels), hidden, weight, gradient)
            if liger_for("wide", precision)
            else None,
            **(torchs(precision, of_torch) if peers.ON_GPU else {}),
        },
        yardsticks=yardsticks,
        agree=close_in_norm(0.02),
    )


@pytest.mark.skipif(not peers.ON_GPU, reason="Liger's head runs on a GPU")
def test_liger(contest: Contest, sizes: Sizes) -> None:
    """Runs our head at the shape for which Liger publishes times on an H100. Liger's head runs too, if Liger is
    installed.
    """
    features, vocabulary = LIGERS
    like = replace(sizes, wide=features, vocabulary=vocabulary) if sizes.wide == 3_584 else sizes
    hidden, weight, labels = inputs.lm_head(like, "wide", torch.bfloat16)
    gradient = inputs.advantages(len(labels))

    contest(
        f"linear_logprob_entropy forward, {LIGER_SHAPE}",
        size_of(hidden, weight),
        lambda: d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=torch.bfloat16),
        peers={LIGER: peers.liger() and (lambda: peers.liger_head(hidden, weight, labels))},
        yardsticks={"matmul": lambda: linear(hidden, weight)},
        agree=close(0.2),
    )
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    contest(
        f"linear_logprob_entropy forward + backward, {LIGER_SHAPE}",
        size_of(hidden, weight),
        step_of(every_row(labels, torch.bfloat16), hidden, weight, gradient),
        peers={LIGER: peers.liger() and step_of(of_peer(peers.liger_head, labels), hidden, weight, gradient)},
        yardsticks={"four products": lambda: four_products(hidden, weight, logits)},
        agree=close_in_norm(0.02),
    )


@pytest.mark.skipif(not peers.ON_GPU, reason="benchmarks/verl_head.py has it on a CPU, from verl")
def test_verl(contest: Contest, sizes: Sizes) -> None:
    """These peers have their own contests because they start slowly: importing Liger takes nine seconds, and for verl's
    kernels Triton first tries several variants.
    """
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    gradient = inputs.advantages(len(labels))
    kernel = peers.verl_kernel()

    contest(
        "linear_logprob_entropy forward, wide, bf16, beside verl's kernel",
        size_of(hidden, weight),
        lambda: d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=torch.bfloat16),
        peers={VERL_KERNEL: kernel and (lambda: kernel(hidden, weight, labels))},
        agree=close(0.2),
    )
    contest(
        "linear_logprob_entropy forward + backward, wide, bf16, beside verl's chunks",
        size_of(hidden, weight),
        step_of(every_row(labels, torch.bfloat16), hidden, weight, gradient),
        peers={
            "verl's chunks": peers.liger_module()
            and step_of(of_peer(peers.verl_head, labels), hidden, weight, gradient),
            VERL_KERNEL: kernel and step_of(of_peer(kernel, labels), hidden, weight, gradient),
        },
        agree=close_in_norm(0.02),
    )


@pytest.mark.skipif(not peers.ON_GPU, reason="bench_unsloth.py has it on a CPU")
def test_unsloth(contest: Contest, sizes: Sizes) -> None:
    """These contests come last, since importing Unsloth changes the code of other packages."""
    beside_unsloth(contest, sizes)


@pytest.mark.skipif(not peers.ON_GPU, reason="a CPU's default was chosen by such a measurement")
@pytest.mark.parametrize("precision", ["bf16", "bf16, fp32 logits"])
def test_workspace(contest: Contest, sizes: Sizes, precision: str) -> None:
    """Compares sizes of a tile of logits. A tile that stays in the second-level cache saves time, but its products are
    smaller, which costs time.
    """
    dtype, logits_dtype = PRECISIONS[precision]
    hidden, weight, labels = inputs.lm_head(sizes, "wide", dtype)

    def of(mebibytes: int | None) -> Work:
        workspace = {} if mebibytes is None else {"workspace_bytes": mebibytes << 20}
        return lambda: d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=logits_dtype, **workspace)

    contest(
        f"linear_logprob_entropy forward by workspace, wide, {precision}",
        size_of(hidden, weight),
        of(None),
        yardsticks={f"{size} MiB": of(size) for size in (16, 24, 32, 48, 64, 128, 512, 1280)}
        | {"matmul": lambda: linear(hidden, weight)},
    )


@pytest.mark.skipif(not peers.ON_GPU, reason="a CPU's default was chosen by such a measurement")
def test_workspace_of_a_step(contest: Contest, sizes: Sizes) -> None:
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    gradient = inputs.advantages(len(labels))

    def of(**workspace: int) -> Work:
        return step_of(every_row(labels, torch.bfloat16, **workspace), hidden, weight, gradient)

    contest(
        "linear_logprob_entropy forward + backward by workspace, wide, bf16",
        size_of(hidden, weight),
        of(),
        yardsticks={f"{size} MiB": of(workspace_bytes=size << 20) for size in (32, 128, 512, 1280)},
    )


def test_accumulated_gradients(contest: Contest, sizes: Sizes) -> None:
    """10 % of the tokens have a gradient. The weight's gradient is added to the gradient of other micro-batches."""
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    every = inputs.advantages(len(labels))
    few = every * (torch.arange(len(every), device=every.device) % 10 == 0)
    total = torch.zeros_like(weight)

    def backward(weight_grad_into: torch.Tensor | None) -> Work:
        leaf = weight.detach().requires_grad_()
        leaf.grad = total

        def forward() -> torch.Tensor:
            options = {"weight_grad_into": weight_grad_into, "max_grad_rows": len(few) // 10 + 1}
            return d3s.linear_logprob_entropy(hidden, leaf, labels, logits_dtype=torch.bfloat16, **options)[0]

        return Prepared(forward, lambda logprob: logprob.backward(few))

    contest(
        "linear_logprob_entropy backward, 10% of the tokens, wide, bf16, added to a gradient",
        size_of(hidden, weight),
        backward(total),
        yardsticks={"autograd adds it": backward(None)},
    )


def beside_unsloth(contest: Contest, sizes: Sizes) -> None:
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    gradient = inputs.advantages(len(labels))
    name = UNSLOTH if inputs.device.type == "cpu" else "Unsloth's head"

    contest(
        f"linear_logprob_entropy forward, wide, bf16{BESIDE_UNSLOTH}",
        size_of(hidden, weight),
        lambda: d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=torch.bfloat16),
        peers={name: peers.unsloth() and (lambda: peers.unsloth_head(hidden, weight, labels))},
        agree=close(0.2),
    )
    contest(
        f"{HEAD_STEP}, wide, bf16{BESIDE_UNSLOTH}",
        size_of(hidden, weight),
        step_of(every_row(labels, torch.bfloat16), hidden, weight, gradient),
        peers={name: peers.unsloth() and step_of(of_peer(peers.unsloth_head, labels), hidden, weight, gradient)},
        agree=close_in_norm(0.02),
    )


def step_of(function: Callable, hidden: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> Work:
    """A step: it computes the log-probabilities of a head, and the gradients of the hidden states and of the weight."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def of_peer(head: Callable, labels: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The log-probabilities of a peer's head."""
    return lambda hidden, weight: head(hidden, weight, labels)[0]


def torchs(precision: str, bind: Callable[[Callable], Work]) -> dict[str, Work | None]:
    """torch's own head in two variants: with its default options, and in chunks. On a CPU, there is only the first
    variant, since chunks would take minutes. It is compared only in bfloat16, the precision in which our head is
    fastest.
    """
    if not peers.ON_GPU and precision != "bf16":
        return {}
    heads = {TORCHS_HEAD: peers.torchs_head(chunks=False)}
    if inputs.device.type == "cuda":
        heads[f"{TORCHS_HEAD}, in chunks"] = peers.torchs_head(chunks=True)
    return {name: head and bind(head) for name, head in heads.items()}


def every_row(labels: torch.Tensor, logits_dtype: torch.dtype, **options: int) -> Callable[..., torch.Tensor]:
    """Our log-probabilities, for a step in which every row has a gradient."""
    options |= {"logits_dtype": logits_dtype, "max_grad_rows": len(labels)}
    return lambda hidden, weight: d3s.linear_logprob_entropy(hidden, weight, labels, **options)[0]


def liger_for(width: str, precision: str) -> bool:
    """Whether Liger's head is compared with ours: only if it is installed, the products are large, and the logits are
    bfloat16.
    """
    return width == "wide" and precision == "bf16" and peers.liger() is not None


def four_products(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The matrix products of a step that does not store the logits: the logits twice, and then the two gradients."""
    for _ in range(2):
        torch.mm(hidden, weight.t(), out=logits)
    return logits @ weight, logits.t() @ hidden


def three_products(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The matrix products of a step that stores the logits."""
    torch.mm(hidden, weight.t(), out=logits)
    return logits @ weight, logits.t() @ hidden


def in_parts(work: Callable, parts: int | None = None) -> Callable:
    """The work with the gradient of the hidden states in this many parts of the vocabulary. None: as many as the
    library chooses.
    """
    chosen = tiles.parts_of if parts is None else lambda *_: parts

    def run() -> tuple[torch.Tensor, ...]:
        with mock.patch.object(products, "SPLITS", True), mock.patch.object(tiles, "parts_of", chosen):
            return work()

    return run


class ReadAtOnce(HostNumber):
    """A number of rows that the host reads before it starts small ops, as in an earlier version."""

    def __init__(self, number: torch.Tensor) -> None:
        super().__init__(number)
        self.value()


def read_first(work: Callable) -> Callable:
    def run() -> tuple[torch.Tensor, ...]:
        with mock.patch.object(forward, "HostNumber", ReadAtOnce):
            return work()

    return run


def with_the_old_cut(work: Callable) -> tuple[torch.Tensor, ...]:
    """Runs the work with tiles as they were cut in an earlier version: a tile has the whole vocabulary, and as many
    rows as fit into the workspace.
    """

    def cut(cls: type[Tiles], hidden: torch.Tensor, problem: HeadProblem, kept: int = 0, **_: object) -> Tiles:
        vocabulary, dtype = len(problem.weight), problem.logits_dtype
        elements = (problem.workspace_bytes or SIZES["cuda"].workspace_bytes) // dtype.itemsize
        rows = max(1, min(len(hidden), elements // vocabulary // 128 * 128))
        room = torch.empty(rows * whole_vectors(vocabulary, dtype), dtype=dtype, device=hidden.device)
        return cls(len(hidden), vocabulary, rows, vocabulary, room, kept)

    with mock.patch.object(Tiles, "cut", classmethod(cut)):
        return work()


def fast(width: str) -> bool:
    """Whether plain PyTorch runs, and is compared with ours. It is slow on a CPU, so there it runs only for the narrow
    head.
    """
    return peers.ON_GPU or width == "narrow"


def size_of(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    return describe(len(hidden), *weight.shape[::-1], dtype=hidden.dtype)


def close_in_norm(tolerance: float):
    def agree(name: str, ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
        for mine, other in zip(ours, theirs, strict=True):
            error = (mine.float() - other.float()).norm() / mine.float().norm()
            assert error <= tolerance, f"{name}: a gradient is {error:.2g} off, relative in norm"

    return agree
