"""What waits for a GPU, seen without one: tensors here say that they are on one, and have no values for the host.

A tensor of the CPU among them shows too, where torch would copy it to the GPU and wait for that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases.draw import Draw
from cases.table import OPS
from helpers import EVERYTHING
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d3s_kernels import _torch
from d3s_kernels._arguments.bundles import GradientArguments, NumberOrTensor, OptionalSupports
from d3s_kernels._dispatch import backends, over_supports
from d3s_kernels._lm_head import backward, forward, products, tiles
from d3s_kernels._lm_head.problem import WHOLE, HeadProblem, Shard
from d3s_kernels.distributed import rollouts, tokens

ATEN = torch.ops.aten
GROUP: Any = None  # tests put a stand-in in its place
DRAWS = 6 if EVERYTHING else 2
DTYPES = {"float": torch.float32, "double": torch.float64, "int": torch.int32, "long": torch.int64}
PACKED = torch.contiguous_format
NO_LAUNCH = {"device", "empty", "new_empty", "slice", "select", "view", "t", "unbind", "detach"}
# What a torch without CUDA refuses to do for a GPU by these names; and the address of a tensor that has none.
OTHERWISE: dict[Any, Any] = {
    Tensor.__invert__: ATEN.bitwise_not,
    Tensor.copy_: ATEN.copy_,
    Tensor.__int__: lambda values: int(ATEN._local_scalar_dense(values)),
    Tensor.__bool__: lambda values: bool(ATEN._local_scalar_dense(values)),
    Tensor.contiguous: lambda values: values if values.is_contiguous() else values.clone(memory_format=PACKED),
    Tensor.data_ptr: lambda values: 0,
    **{getattr(Tensor, name): lambda values, dtype=dtype: values.to(dtype) for name, dtype in DTYPES.items()},
}


class Functions(TorchFunctionMode):
    """The same for indexing, as torch does it: a 0-d index is read by the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (Tensor.__getitem__, Tensor.__setitem__):
            return OTHERWISE.get(function, function)(*args, **(kwargs or {}))
        view, tensors = args[0], []
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        for part in index:
            if isinstance(part, Tensor) and part.dim() == 0:
                part = part.item()
            at = len(tensors)
            if part is Ellipsis:
                tensors += [None] * (view.dim() - len(index) + 1)
            elif isinstance(part, int):
                view = ATEN.select.int(view, at, part)
            elif isinstance(part, slice):
                view = ATEN.slice.Tensor(view, at, part.start, part.stop, part.step or 1)
                tensors.append(None)
            else:
                tensors.append(part)
        by_tensor = any(part is not None for part in tensors)
        if function is Tensor.__getitem__:
            return ATEN.index.Tensor(view, tensors) if by_tensor else view
        if by_tensor:
            return ATEN.index_put_(view, tensors, args[2])
        return ATEN.copy_(view, args[2]) if isinstance(args[2], Tensor) else view.fill_(args[2])


class Watched(TorchDispatchMode):
    """Counts what the host reads, which is 1, and refuses copies between devices."""

    waits = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []  # names of ops

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(op.overloadpacket.__name__)
        if op is ATEN._local_scalar_dense.default:
            self.waits += 1
            return args[0].dtype == torch.bool or 1
        # Torch 2.11's fake one takes out_dtype for a number.
        wide_sums = ATEN.addmm.dtype_out, ATEN.baddbmm.dtype_out
        found = kwargs["out"] if op in wide_sums else op(*args, **(kwargs or {}))
        devices = {part.device.type for part in tree_leaves((args, kwargs, found)) if isinstance(part, Tensor)}
        # A kernel for each element takes a number of the CPU as an argument; torch.where copies it to the GPU.
        takes_numbers = torch.Tag.pointwise in op.tags and op.overloadpacket is not ATEN.where
        assert len(devices) < 2 or takes_numbers, f"{op} of tensors on {devices}"
        return found


class ReadLate(forward.HostNumber):
    """A number that the host reads when it is asked for, in place of a copy to pinned memory."""

    def __init__(self, number: Tensor) -> None:
        self._number = number

    def value(self) -> int:
        return int(ATEN._local_scalar_dense(self._number))


@contextmanager
def watched() -> Iterator[Watched]:
    current = patch.object(torch.accelerator, "device_index", lambda index: nullcontext())
    numbers = patch.object(forward, "HostNumber", ReadLate)
    with torch.no_grad(), current, numbers, FakeTensorMode(), Watched() as mode, Functions():
        yield mode


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def drawn(op: str, seed: int) -> dict[str, Any]:
    """Arguments from the table, with a bound on what the host would otherwise ask for."""
    given = OPS[op].draw(Draw(seed, most=100))
    if "max_dense_rows" in given:
        given["max_dense_rows"] = len(given["support_offsets"])
    return given


def on_gpu(op: str, given: dict[str, Any]) -> list[Any]:
    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    schema = getattr(torch.ops.d3s_kernels, op).default._schema
    return [moved(given.get(argument.name, argument.default_value)) for argument in schema.arguments]


@pytest.mark.parametrize("op", sorted(_torch.KERNELS))
def test_plain_pytorch(op: str) -> None:
    for seed in range(DRAWS):
        given = drawn(op, seed)
        with watched() as mode:
            _torch.KERNELS[op](*on_gpu(op, given))
        assert mode.waits == 0, seed


def test_triton() -> None:
    pytest.importorskip("triton")
    sys.path.insert(0, str(Path(__file__).parent / "binaries"))
    from triton_launches import recorded

    from d3s_kernels import _triton

    launches = 0
    for op, kernel in _triton.KERNELS.items():
        for seed in range(DRAWS):
            given = drawn(op, seed)
            with recorded() as made, watched() as mode:
                kernel(*on_gpu(op, given))
            assert mode.waits == 0, (op, seed)
            launches += len(made)
    assert launches > DRAWS


class StandIn:
    """A rank of two, whose other rank has the same."""

    rank, size = 1, 2

    def add_(self, values: Tensor) -> Tensor:
        return values

    maximum_ = add_

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, values])

    def gather_number(self, number: int, like: Tensor) -> Tensor:
        return torch.full((2,), number, device=like.device)


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, StandIn())], ids=["whole", "shard"])  # type: ignore[arg-type]
@pytest.mark.parametrize("spans", [False, True], ids=["all tokens", "spans"])
@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "mask"])
def test_the_head(masked: bool, spans: bool, shard: Shard) -> None:
    """Without a bound the host asks once in the forward, if a mask or spans choose rows, and once in the backward."""
    for bound, most_dense, into in ((None, None, None), (5, None, gpu), (9, 0, gpu)):
        with watched() as mode:
            given: dict[str, Any] = {"mask": gpu(7, dtype=torch.bool) if masked else None}
            if spans:
                ids, offsets = gpu(20, dtype=torch.int32), gpu(8, dtype=torch.int64)
                given["supports"] = OptionalSupports(ids, offsets, max_dense_rows=most_dense)
            labels, (hidden, weight) = gpu(7, dtype=torch.int64), (gpu(n, 16, dtype=torch.bfloat16) for n in (7, 50))
            given |= {"max_rows": bound, "max_grad_rows": bound, "shard": shard}
            problem = HeadProblem(hidden, weight, labels, None, NumberOrTensor(1.0, gpu(7)), 30.0, **given)
            _, *statistics, _ = forward.forward(problem)
            in_forward, mode.waits = mode.waits, 0
            incoming = backward.Incoming(gpu(7), gpu(7), *statistics)
            wanted = backward.Wanted(True, True, False)
            backward.backward(problem, incoming, wanted, None if into is None else into(50, 16))
        assert (in_forward, mode.waits) == ((0, 0) if bound else (int(masked or spans), 1)), bound


@pytest.mark.parametrize("keeps", [None, 1 << 30], ids=["recomputed", "kept logits"])
def test_small_ops_are_started_before_the_host_waits(keeps: int | None) -> None:
    """So that a GPU does them while the host waits, and then has its first product soon."""
    with watched() as mode, patch.object(products, "widens", lambda values: True):
        hidden, weight = gpu(7, 16, dtype=torch.bfloat16), gpu(50, 16, dtype=torch.bfloat16)
        of_rows = {"mask": gpu(7, dtype=torch.bool), "temperature": NumberOrTensor(1.0, gpu(7))}
        problem = HeadProblem(hidden, weight, gpu(7, dtype=torch.int64), keep_logits_bytes=keeps, **of_rows)
        *results, room = forward.forward(problem)
        of_forward, mode.calls = mode.calls, []
        kept = tiles.kept_logits(problem, room)
        incoming = backward.Incoming(gpu(7), gpu(7), *results[1:])
        backward.backward(problem, incoming, backward.Wanted(True, True, False), kept=kept)
    for calls, gathers in ((of_forward, 2), (mode.calls, 3 if keeps is None else 4)):
        launches = [call for call in calls if call not in NO_LAUNCH]
        read = launches.index("_local_scalar_dense")
        assert launches[:read].count("index_select") == gathers
        assert launches[read + 1] == "index_select"  # the rows of hidden states
        assert launches[read + 2] in ("mm", "logprob_entropy_backward_rows_")


@pytest.mark.parametrize("packs", [False, True], ids=["kernels that skip rows", "plain PyTorch"])
@pytest.mark.parametrize("bound", [None, 0, 3])
def test_rows_over_supports(bound: int | None, packs: bool) -> None:
    """Without a bound plain PyTorch, which packs dense rows, asks once in the forward, and once in the backward."""
    with watched() as mode, patch.object(backends, "reads_masked_rows", lambda device: packs):
        sampling = OptionalSupports(gpu(20, dtype=torch.int32), gpu(9, dtype=torch.int64), True, bound)
        logits, labels, mask = gpu(2, 4, 50), gpu(2, 4, dtype=torch.int64), gpu(2, 4, dtype=torch.bool)
        heat = NumberOrTensor(1.0, gpu(2, 4))
        *results, dense = over_supports._statistics(logits, labels, sampling, heat, mask)
        in_forward, mode.waits = mode.waits, 0
        given = GradientArguments(gpu(2, 4), gpu(2, 4), logits, labels, *results[1:])
        over_supports._gradient(given, dense, sampling, heat, mask)
    asks = int(packs and bound is None)
    assert (in_forward, mode.waits) == (asks, asks)


@pytest.mark.parametrize("placement", ["pieces", "global"])
def test_tokens_across_ranks(placement: str) -> None:
    with watched() as mode, patch.object(tokens, "ranks_of", lambda group: StandIn()):
        entropy, ratio, mask = gpu(30), gpu(), gpu(30) > 0
        layout = tokens.Layout(GROUP, placement, gpu(4, dtype=torch.int64))
        tokens.topk_mask(entropy, ratio, None, mask, True, layout)
        for scope in ("batch", "sequence"):
            tokens.select_tokens(entropy, gpu(3), ratio, "entropy", mask, scope, True, None, layout)
    assert mode.waits == 0


@pytest.mark.parametrize("placement", ["whole", "global"])
def test_rollouts_across_ranks(placement: str) -> None:
    """With max_rollouts."""
    with watched() as mode, patch.object(rollouts, "ranks_of", lambda group: StandIn()):
        rewards, keep = gpu(30), gpu(dtype=torch.int32)
        layout = rollouts.Layout(GROUP, placement, gpu(4, dtype=torch.int64), max_rollouts=40)
        rollouts.group_advantages(rewards, "batch", 1e-6, 1, layout)
        for rule, equal_rows in (("max_variance", placement == "whole"), ("highest", False)):
            of_rule = layout._replace(offsets=None) if equal_rows else layout
            rollouts.select_rollouts(rewards, keep, rule, "batch", rewards > 0, None, equal_rows, of_rule)
    assert mode.waits == 0
