"""Measures log-probabilities and entropies of a vocabulary that two tensor ranks share, and their gradients, in turns:
Megatron's way, over the shard's logits, and ours, without them.

    .venv/megatron-0.16.1/bin/python -m benchmarks.megatron_head
    .venv/megatron-0.16.1/bin/python -m benchmarks.megatron_head --vocabulary 512 --hidden 64 --rows 64 --rounds 3

Megatron's way is its own ``ColumnParallelLinear`` and ``vocab_parallel_cross_entropy``, and an entropy of the shards'
logits as trainers write it: three all-reduces, nothing kept twice. It computes all rows, whatever the loss reads.
Ours computes the rows of a mask. Both leave the weight's gradient in Megatron's ``main_grad``. The two ranks are
processes with one thread each, which talk by gloo. Each peak is that of a rank's resident memory over what it was
before the pass, in processes of their own; bytes are what a rank sends, if a collective of two ranks is a ring.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from . import machine, memory
from .second_rank import Works, with_second_rank

with warnings.catch_warnings():  # each import says that neither Apex nor Transformer Engine is installed
    warnings.simplefilter("ignore")
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

from d3s_kernels.integrations.megatron import shard_logprob_entropy

THEIRS, SOME, ALL, KEPT = "Megatron", "ours, kept rows", "ours, all rows", "with kept logits"
NAMES = (THEIRS, SOME, ALL, KEPT)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MIB = 1 << 20


class Case(NamedTuple):
    dtype: str
    sequence_parallel: bool
    rows: int
    hidden: int
    vocabulary: int
    kept: float


# ---- Megatron's way --------------------------------------------------------------------------------------------------


class EntropyOfShards(torch.autograd.Function):
    """Entropy of logits whose vocabulary ranks share. It keeps one matrix beside the logits, and may change them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide = logits.float()
        largest = wide.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        share = (wide - largest).exp_()
        total = share.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        share /= total
        mean = torch.einsum("...v,...v->...", share, wide).unsqueeze(-1)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(wide, share, mean)
        ctx.dtype = logits.dtype
        return (largest + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, of_entropy: Tensor) -> tuple[Tensor, None]:
        wide, share, mean = ctx.saved_tensors
        gradient = share.mul_(wide.sub_(mean)).mul_(-of_entropy.unsqueeze(-1))
        return gradient.to(ctx.dtype), None


class Head(MegatronModule):
    """Megatron's output layer, and hidden states such as it gets."""

    def __init__(self, config: TransformerConfig, case: Case) -> None:
        super().__init__(config)
        self.layer = ColumnParallelLinear(
            case.hidden, case.vocabulary, config=config, init_method=config.init_method, bias=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )  # fmt: skip


# ---- the passes of a rank --------------------------------------------------------------------------------------------


class Rank:
    def __init__(self, rank: int, group: dist.ProcessGroup, case: Case) -> None:
        torch.cuda.current_device = lambda: "cpu"
        parallel_state.destroy_model_parallel()  # of the case before
        parallel_state.initialize_model_parallel(2)
        self.case, self.group, dtype = case, parallel_state.get_tensor_model_parallel_group(), DTYPES[case.dtype]
        config = TransformerConfig(
            num_layers=1,
            hidden_size=case.hidden,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=case.sequence_parallel,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            init_method_std=3 * case.hidden**-0.5,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        torch.manual_seed(0)
        self.layer = Head(config, case).layer
        # Kept alive here, since it has the hooks that fill main_grad.
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.layer)
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(case.rows, 1, case.hidden, generator=generator).to(dtype)
        self.hidden = (hidden.chunk(2)[rank].clone() if case.sequence_parallel else hidden).requires_grad_()
        self.labels = torch.randint(case.vocabulary, (1, case.rows), generator=generator)
        self.of_logprob, self.of_entropy = torch.randn(2, 1, case.rows, generator=generator)
        self.kept = torch.rand(1, case.rows, generator=generator) < case.kept

    def theirs(self) -> tuple[Tensor, Tensor]:
        logits, _ = self.layer(self.hidden)
        entropy = EntropyOfShards.apply(logits, self.group)
        # The loss of float32 logits is computed in place.
        own = logits.clone() if logits.dtype == torch.float32 else logits
        return -vocab_parallel_cross_entropy(own, self.labels.T).T, entropy.T

    def ours(self, mask: Tensor | None, keep_logits_bytes: int = 0) -> tuple[Tensor, Tensor]:
        return shard_logprob_entropy(
            self.hidden, self.layer.weight, self.labels, tp_group=self.group, mask=mask,
            sequence_parallel=self.case.sequence_parallel, vocab_size=self.case.vocabulary,
            keep_logits_bytes=keep_logits_bytes,
        )  # fmt: skip

    def step(self, name: str, kept: bool) -> tuple[Tensor, Tensor]:
        """Forward and backward of a loss, of the kept rows or of all."""
        ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            THEIRS: self.theirs,
            KEPT: lambda: self.ours(None, 1 << 40),
        }
        logprob, entropy = ways.get(name, lambda: self.ours(self.kept if kept else None))()
        terms = self.of_logprob * logprob + self.of_entropy * entropy
        (terms * self.kept if kept else terms).sum().backward()
        return logprob.detach(), entropy.detach()

    def gradients(self, name: str, kept: bool) -> tuple[Tensor, ...]:
        self.forget()
        logprob, entropy = self.step(name, kept)
        read = self.kept if kept else torch.ones_like(self.kept)
        assert self.hidden.grad is not None
        found = logprob[read], entropy[read], self.hidden.grad.float(), self.layer.weight.main_grad.clone()
        self.forget()
        return found

    def forget(self) -> None:
        self.hidden.grad = None
        self.ddp.zero_grad_buffer()

    def compare(self) -> None:
        """Both ways compute the same, within the dtype's rounding."""
        for kept in (True, False):
            for ours, theirs in zip(self.gradients(SOME, kept), self.gradients(THEIRS, kept), strict=True):
                error = float((ours - theirs).norm() / theirs.norm())
                assert error < (2e-2 if self.case.dtype == "bfloat16" else 1e-4), error


def make(rank: int, group: dist.ProcessGroup, case: Case) -> Works:
    """Works of a rank. The caller forgets gradients between passes, which costs both ways the same."""
    this = Rank(rank, group, case)
    works: Works = {name: lambda name=name: this.step(name, name == SOME) for name in NAMES}
    return works | {"forget": this.forget, "compare": this.compare}


# ---- what is measured ------------------------------------------------------------------------------------------------


def times_of(case: Case, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    with with_second_rank(make, case) as works:
        works["compare"]()  # also warms up
        for turn in range(rounds):
            for name in NAMES if turn % 2 else reversed(NAMES):
                works["forget"]()
                start = perf_counter()
                works[name]()
                times[name].append(perf_counter() - start)
    return times


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends in the block, one number for each collective. All callers end in these methods.

    Two ranks of a ring exchange half of an all-reduce twice, their own part of a gather, and half of a reduce-scatter.
    """
    sent: list[int] = []

    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    bytes_of: dict[str, Callable[[tuple[Any, ...]], int]] = {
        "allreduce": lambda given: size(given[0][0]),
        "allgather": lambda given: size(given[1][0]),
        "_allgather_base": lambda given: size(given[1]),
        "_reduce_scatter_base": lambda given: size(given[1]) // 2,
    }
    # torch 2.13 has new names for the last two.
    bytes_of["all_gather_single"] = bytes_of["_allgather_base"]
    bytes_of["reduce_scatter_single"] = bytes_of["_reduce_scatter_base"]

    def counting(method: str) -> Any:
        call = getattr(dist.ProcessGroup, method)

        def counted_call(group: Any, *arguments: Any, **options: Any) -> Any:
            sent.append(bytes_of[method](arguments))
            return call(group, *arguments, **options)

        return mock.patch.object(dist.ProcessGroup, method, counted_call)

    with ExitStack() as patched:
        for method in bytes_of.keys() & set(dir(dist.ProcessGroup)):
            patched.enter_context(counting(method))
        yield sent


def alone(case: Case, name: str) -> tuple[int, list[int]]:
    """The peak of a pass on rank 0 over what it held before, and the bytes that each collective sends."""
    with with_second_rank(make, case) as works:
        works[name]()  # starts threads, and connects the ranks
        works["forget"]()
        # What the C library has freed but not given back would hide as much of the peak.
        ctypes.CDLL(None).malloc_trim(0)
        with counted() as sent:
            peak = memory.growth(works[name])
    return peak, sent


def in_own_processes(case: Case, name: str) -> tuple[int, list[int]]:
    given = json.dumps({"case": case._asdict(), "name": name})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.megatron_head", "--alone", given]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    peak, sent = json.loads(done.stdout.splitlines()[-1])
    return peak, sent


def report(case: Case, rounds: int) -> None:
    times, places = times_of(case, rounds), {name: in_own_processes(case, name) for name in NAMES}
    print(f"\n{case.dtype}, sequence parallelism {'on' if case.sequence_parallel else 'off'}")
    print(f"{'':18}{'median':>10}{'fastest':>10}  {'of Megatron, pairs':28}{'peak':>12}{'':9}{'sends':>12}{'in':>5}")
    for name in NAMES:
        pairs = [ours / theirs for ours, theirs in zip(times[name], times[THEIRS], strict=True)]
        low, middle, high = min(pairs), statistics.median(pairs), max(pairs)
        peak, sent = places[name]
        print(
            f"{name:18}{1000 * statistics.median(times[name]):7.0f} ms{1000 * min(times[name]):7.0f} ms  "
            f"{f'{middle:.3f}x ({low:.3f} to {high:.3f})':28}{peak / MIB:8.1f} MiB  {peak / places[THEIRS][0]:.3f}x "
            f"{sum(sent) / MIB:8.2f} MiB{len(sent):5}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option, default in {"rows": 1_024, "hidden": 1_024, "vocabulary": 151_936, "rounds": 9}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--kept", type=float, default=0.1)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        asked = json.loads(given.alone)
        print(json.dumps(alone(Case(**asked["case"]), asked["name"])))
        return
    released = megatron.core.__version__
    print(machine.cpu_model(), "torch", torch.__version__, "megatron-core", released, "commit", machine.commit())
    print(vars(given))
    for dtype in given.dtypes:
        for sequence_parallel in (False, True):
            case = Case(dtype, sequence_parallel, given.rows, given.hidden, given.vocabulary, given.kept)
            report(case, given.rounds)


if __name__ == "__main__":
    main()
