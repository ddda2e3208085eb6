#!/usr/bin/env python3
"""Counts what the LM head allocates, multiplies and moves at the shapes of a GPU, without a GPU.

    .venv/bin/python tools/head_traffic.py            writes the tables of docs/lm-head.md
    .venv/bin/python tools/head_traffic.py --check    exit status 1 if the tables differ from the counts

Fake tensors have shapes but no values, and a dispatch mode sees every op on them. If torch is built without CUDA, it
cannot slice a fake tensor on a GPU. So the fake tensors are on the CPU, but with a GPU's tiles, slices and wide
products.
"""

from __future__ import annotations

import argparse
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d3s_kernels._dispatch import backends
from d3s_kernels._lm_head import products, tiles
from d3s_kernels._lm_head.backward import Incoming, Wanted
from d3s_kernels._lm_head.backward import backward as head_backward
from d3s_kernels._lm_head.forward import forward as head_forward
from d3s_kernels._lm_head.problem import HeadProblem

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lm-head.md"
GPU = tiles.SIZES["cuda"]
GB, MIB = 1e9, 1 << 20

# For each GPU: the floating point operations per second of products of these shapes; 90 % of the memory's peak rate.
GPUS = {"H100": (700e12, 3.0e12), "H200": (680e12, 4.3e12)}


class Product(NamedTuple):
    rows: int
    terms: int  # of each sum
    columns: int
    bytes: int  # arguments read once; the result written, and also read if the product is added to it
    parts: int = 1  # products of this shape that are started together

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.terms * self.columns * self.parts


_ALLOCATES = {"empty", "new_empty", "empty_like", "empty_strided"}
_FILLS = {"zeros", "new_zeros", "zeros_like", "full", "new_full", "full_like", "fill_", "zero_", "arange", "ones"}
_GATHERS = {"index_select"}  # these read as much as they write, not their whole source
_SCATTERS = {"index_copy_"}


class Traffic(TorchDispatchMode):
    """Records the ops on fake tensors in this context: the matrix products, the bytes that all other ops read and
    write, and the peak of the memory that is allocated beyond the given tensors.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.moved = self.peak = self._now = 0
        self._bytes = {tensor.untyped_storage()._cdata: 0 for tensor in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "baddbmm"):
            # These products write to existing memory. With fake tensors, addmm would allocate memory (and torch 2.11
            # has no wide addmm for fake tensors), so the products are recorded but not run.
            out = args[0] if name == "addmm_" else kwargs["out"]
            *total, a, b = [value for value in args if isinstance(value, Tensor)]
            moved = _size((a, b)) + (1 + bool(total and kwargs.get("beta", 1))) * _size(out)
            parts = a.shape[0] if a.dim() == 3 else 1
            self.products.append(Product(*a.shape[-2:], b.shape[-1], moved, parts))
            return out
        result = function(*args, **kwargs)
        self.moved += moved_by(function, args, kwargs, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._allocated(tensor.untyped_storage())
        return result

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._bytes.pop(key, 0)

    @property
    def operations(self) -> int:
        return sum(each.operations for each in self.products)

    def seconds(self, gpu: str) -> float:
        """The time if each product is bound by its operations or its bytes, and all else by the memory's rate."""
        operations, rate = GPUS[gpu]
        return self.moved / rate + sum(max(p.operations / operations, p.bytes / rate) for p in self.products)


def _size(value: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tree_leaves(value) if isinstance(tensor, Tensor))


def moved_by(function: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """The bytes that an op reads and writes, each element once."""
    name, schema = function.overloadpacket.__name__, function._schema
    if name == "logprob_entropy_backward_":
        logits, *_, last = args[2:]
        gradient = last if isinstance(last, torch.dtype) else logits.dtype
        return _size((args, kwargs)) + logits.numel() * gradient.itemsize
    if name == "logprob_entropy_backward_rows_":  # reads only the logits of the packed rows
        logits, gradient = args[2], args[8]
        return _size((args, kwargs)) - _size(logits) + gradient.numel() * logits.itemsize
    given = zip(args, schema.arguments, strict=False)
    written = [value for value, argument in given if argument.alias_info and argument.alias_info.is_write]
    views = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
    if views or name in _ALLOCATES or function.namespace == "prim":
        return 0
    if name in _FILLS:
        return _size(written or result)
    if name in _GATHERS:
        return 2 * _size(result)
    if name in _SCATTERS:
        return 2 * _size(args[3])
    read = args[1:] if name == "copy_" else args
    return _size((read, kwargs)) + _size(written or result)


def _returns(value: Any) -> Callable[..., Any]:  # not a Mock, which would keep its arguments alive
    return lambda *_: value


class _AsOnGpu(ExitStack):
    def __enter__(self) -> _AsOnGpu:
        super().__enter__()
        self.enter_context(mock.patch.dict(tiles.SIZES, cpu=GPU))
        self.enter_context(mock.patch.dict(backends.SLICES, cpu=backends.GPU_SLICE))
        self.enter_context(mock.patch.object(products, "widens", _returns(True)))
        self.enter_context(mock.patch.object(products, "multiplies", _returns(True)))
        self.enter_context(mock.patch.object(products, "_sums_apart", _returns(False)))
        self.enter_context(mock.patch.object(HeadProblem, "_check_labels", _returns(None)))
        self.enter_context(FakeTensorMode())
        return self


def _problem(rows: int, width: int, vocabulary: int, softcap: float | None = None) -> HeadProblem:
    hidden, weight = (torch.empty(length, width, dtype=torch.bfloat16) for length in (rows, vocabulary))
    return HeadProblem(hidden, weight, torch.empty(rows, dtype=torch.long), logit_softcap=softcap)


def forward(rows: int, width: int, vocabulary: int, *, keeps: bool = False) -> Traffic:
    """The forward. ``keeps`` says whether it keeps all logits."""
    with _AsOnGpu():
        given = _problem(rows, width, vocabulary)._replace(keep_logits_bytes=1 << 40 if keeps else None)
        with Traffic(given.hidden, given.weight, given.labels) as traffic:
            head_forward(given)
    return traffic


def backward(
    rows: int,
    width: int,
    vocabulary: int,
    *,
    active: int | None,
    frozen: bool = False,
    into: torch.dtype | None = None,
    softcap: float | None = None,
    kept: bool = False,
    splits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
) -> Traffic:
    """The backward of log-probabilities. ``active`` bounds the number of rows with a gradient; with None the trace
    fails, since it would have to read a value. The weight has a gradient unless it is ``frozen``. With ``into``, this
    gradient is added to a tensor of that dtype. ``kept`` says whether the forward has kept all logits, and ``splits``
    whether the gradient of the hidden states may be summed in parts.
    """
    with _AsOnGpu(), mock.patch.object(products, "SPLITS", splits):
        given = _problem(rows, width, vocabulary, softcap)
        gradient, *saved = (torch.empty(rows) for _ in range(4))
        total = None if into is None else torch.empty(vocabulary, width, dtype=into)
        given = given._replace(max_grad_rows=active, logits_dtype=logits_dtype)
        logits = torch.empty(rows, vocabulary, dtype=logits_dtype) if kept else None
        known = [given.hidden, given.weight, given.labels, gradient, *saved]
        with Traffic(*known, *(tensor for tensor in (total, logits) if tensor is not None)) as traffic:
            wanted = Wanted(hidden=True, weight=not frozen, bias=False)
            head_backward(given, Incoming(gradient, None, *saved), wanted, total, logits)
    return traffic


# ---- the page --------------------------------------------------------------------------------------------------------

WIDTHS, VOCABULARIES, ROWS = (896, 3_584), (151_936, 50_257), (4_096, 32_768)
# For each kind of weight gradient: options of backward(), and the bytes per element of a returned gradient.
KINDS = {
    "weight's gradient returned": ({}, 2),
    "the same with kept logits": ({"kept": True}, 2),
    "weight's gradient added to a float32 tensor": ({"into": torch.float32}, 0),
    "weight's gradient added to a bfloat16 tensor": ({"into": torch.bfloat16}, 0),
    "weight frozen": ({"frozen": True}, 0),
}
HEAD = "| call | matrix products | everything else | peak memory | predicted time |\n| --- | --- | --- | --- | --- |\n"


def line(call: str, traffic: Traffic, outputs: int) -> str:
    moved = sum(each.bytes for each in traffic.products)
    cells = (
        call,
        f"{traffic.operations / 1e12:.2f}e12 operations and {moved / GB:.2f} GB in products",
        f"{traffic.moved / GB:.2f} GB elsewhere",
        f"peak {(traffic.peak - outputs) / MIB:,.0f} MiB",
        ", ".join(f"{1e3 * traffic.seconds(gpu):.2f} ms on {gpu}" for gpu in GPUS),
    )
    return f"| {' | '.join(cells)} |\n"


def table(width: int, vocabulary: int) -> str:
    lines = [f"### H = {width:,}, V = {vocabulary:,}\n\n", HEAD]
    for rows in ROWS:
        for keeps, words in ((False, ""), (True, ", all logits kept")):
            traffic = forward(rows, width, vocabulary, keeps=keeps)
            lines.append(line(f"forward, {rows:,} rows{words}", traffic, 16 * rows))
        for share, (kind, (options, weight_bytes)) in product((1.0, 0.1), KINDS.items()):
            traffic = backward(rows, width, vocabulary, active=int(share * rows), **options)
            outputs = 2 * rows * width + weight_bytes * vocabulary * width
            given = f"{rows:,} rows" if share == 1 else f"10 % of {rows:,} rows"
            lines.append(line(f"backward, {given}, {kind}", traffic, outputs))
    return "".join(lines)


def blocks(rows: int, width: int) -> int:
    """The blocks of the product for the gradient of the hidden states."""
    return -(-rows // products.BLOCK[0]) * -(-width // products.BLOCK[1])


def parts(rows: int, width: int, vocabulary: int) -> int:
    """The parts of this product, from a trace with logits in bfloat16."""
    found = backward(rows, width, vocabulary, active=rows, splits=True, logits_dtype=torch.bfloat16)
    return max(each.parts for each in found.products)


def busy(count: int, processors: int) -> str:
    """The share of the multiprocessors that have a block, on average over the waves of a product's blocks."""
    return f"{100 * count / processors / -(-count // processors):.0f} %"


def table_of_parts(vocabulary: int = VOCABULARIES[0]) -> str:
    lines = [
        f"### Parts of the gradient of the hidden states, V = {vocabulary:,}\n\n",
        "| rows with a gradient; H | parts | blocks: one part; all | busy of 132 multiprocessors | busy of 148 |\n",
        "| ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for rows, width in product((128, 410, 1_638, 4_096), (896, 2_048, 3_584, 8_192)):
        number, count = parts(rows, width, vocabulary), blocks(rows, width)
        both = count, number * count
        shares = ("; ".join(busy(each, processors) for each in both) for processors in (132, 148))
        cells = f"{rows:,}; {width:,}", str(number), "; ".join(f"{each:,}" for each in both), *shares
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def page(text: str) -> str:
    """The page with recomputed tables."""
    tables = "\n".join(table(width, vocabulary) for width, vocabulary in product(WIDTHS, VOCABULARIES))
    tables += f"\n{table_of_parts()}"
    begin, end = "<!-- tables -->\n", "<!-- end of tables -->"
    assert text.count(begin) == text.count(end) == 1
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{tables}\n{end}", text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    counted = page(text)
    if not check:
        PAGE.write_text(counted, encoding="utf-8")
    elif counted != text:
        print("docs/lm-head.md is not what is counted: run python tools/head_traffic.py")
    return int(check and counted != text)


if __name__ == "__main__":
    sys.exit(main())
