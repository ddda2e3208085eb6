"""Draws random arguments from a seed: scalars, shapes, strides, segments, and values with ties, NaN and infinities.

All tensors are drawn on the CPU, so that every device gets the same values.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

_Any = TypeVar("_Any")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROOM = 1 << 16  # a tensor with several pieces may have at least this many elements, even if the pieces are short
MOST_ROWS = 4096  # the maximum number of rows of logits with spans: Python needs some 50 us to draw a row's span
# REPEATED has few values, so that most segments have ties. SPECIAL has the values that are not finite.
REPEATED = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0)
SPECIAL = (math.inf, -math.inf, math.nan)
# What a test draws in a loop: a quarter in `make test`, and less where kernels are emulated.
EXAMPLES = int(os.environ.get("D3S_TEST_EXAMPLES", "40" if os.environ.get("D3S_TEST_ALL") == "1" else "10"))


def draws(count: int = EXAMPLES, *, most: int = 40) -> Iterator[Draw]:
    """Fresh draws. pytest shows what a failing test printed: the last line has the draw with which it failed."""
    for seed in torch.randint(2**31, (count,)).tolist():
        print(f"Draw({seed}, most={most})")
        yield Draw(seed, most=most)


class Draw:
    """Draws the arguments of a call, with rows and segments of at most ``most``. All are computed from integers, which
    are recorded in ``choices``.

    The integers are drawn with the seed, or taken from the given ``choices`` of another draw. Where those are too few,
    an integer is the lowest possible one, which always means the simplest argument. So a failing call becomes simpler
    if its choices become smaller or fewer.
    """

    def __init__(self, seed: int = 0, *, most: int = 40, choices: Sequence[int] | None = None) -> None:
        self.most = most
        self.choices: list[int] = []
        self._given = choices
        self._random = random.Random(seed)

    # ---- choices ----------------------------------------------------------------------------------------------------

    def integer(self, low: int, high: int) -> int:
        """Draws an integer from ``low`` to ``high``, both included."""
        place = len(self.choices)
        if self._given is None:
            value = self._random.randint(low, high)
        else:
            value = min(max(self._given[place], low), high) if place < len(self._given) else low
        self.choices.append(value)
        return value

    def choice(self, options: Sequence[_Any]) -> _Any:
        """Draws one of the options. The first option is the simplest one."""
        return options[self.integer(0, len(options) - 1)]

    def flag(self) -> bool:
        return self.integer(0, 1) == 1

    def rarely(self) -> bool:
        return self.integer(0, 9) == 9

    def optional(self, value: _Any) -> _Any | None:
        return self.choice((None, value))

    def length(self, low: int = 0, high: int | None = None) -> int:
        """Small and large lengths are equally likely, and many are a power of two, or differ from it by one."""
        high = self.most if high is None else min(high, self.most)
        size = 1 << self.integer(0, max(high, 1).bit_length())
        value = size + self.integer(-1, 1) if self.flag() else self.integer(0, size)
        return min(max(value, low), max(low, high))

    # ---- shapes -----------------------------------------------------------------------------------------------------

    def room(self, elements: int) -> int:
        """Returns how many pieces fit into one tensor, if each piece has ``elements`` elements."""
        return max(1, max(8 * self.most, ROOM) // max(1, elements))

    def rows(self, columns: int, least_dims: int = 0) -> tuple[int, ...]:
        """Up to two leading dimensions of a tensor whose rows have ``columns`` elements; few enough for its size."""
        most = max(1, 8 * self.most // max(1, columns))
        dims = self.integer(least_dims, max(least_dims, 2))
        if dims == 0:
            return ()
        first = self.length(0 if self.rarely() else 1, most)
        return (first,) if dims == 1 else (first, self.integer(1, max(1, most // max(1, first))))

    def wide(self, columns: int) -> int:
        """Returns ``columns``, or a larger number for which :meth:`rows` draws at most MOST_ROWS rows."""
        return max(columns, 8 * self.most // MOST_ROWS)

    def offsets(self, columns: int = 1) -> Tensor:
        """The offsets of up to six segments, some of them empty, of rows that have ``columns`` elements each."""
        lengths, left = [], max(1, 8 * self.most // max(1, columns))
        for _ in range(self.integer(0, 6)):
            lengths.append(self.length(0, left))
            left -= lengths[-1]
        dtype = self.choice((torch.int64, torch.int32))
        return torch.tensor([0, *accumulate(lengths)], dtype=dtype)

    def segments(self) -> tuple[tuple[int, ...], Tensor | None]:
        """Draws the shape of segmented values, and their offsets. If the offsets are None, each row is a segment."""
        if self.flag():
            offsets = self.offsets()
            return (int(offsets[-1]),), offsets
        columns = self.length()
        return (*self.rows(columns), columns), None

    def parts(self, total: int, size: int) -> list[int]:
        """How many of ``total`` items each of ``size`` ranks has. Some have none, and sometimes one has all."""
        edges = sorted(self.integer(0, total) for _ in range(size - 1))
        return [b - a for a, b in zip([0, *edges], [*edges, total], strict=True)]

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def generator(self) -> torch.Generator:
        """Returns a generator with a drawn seed, for the values of one tensor."""
        return torch.Generator().manual_seed(self.integer(0, 2**31))

    def laid_out(self, tensor: Tensor, turned: bool = True) -> Tensor:
        """The same values packed, misaligned, with gaps between rows, or (if ``turned``) transposed."""
        layout = self.choice(("packed", "packed", "misaligned", "apart", "turned"))
        if layout == "turned" and turned and tensor.dim() >= 2:
            tensor = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif layout == "misaligned":
            tensor = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)
        elif layout == "apart" and tensor.dim() >= 1:
            room = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
            tensor = room[..., : tensor.shape[-1]].copy_(tensor)
        return tensor

    def normal(self, generator: torch.Generator, dtype: torch.dtype, *shape: int, deviation: float = 1.0) -> Tensor:
        """Draws normally distributed values, in a random layout, but not transposed."""
        return self.laid_out((torch.randn(shape, generator=generator) * deviation).to(dtype), turned=False)

    def values(
        self,
        shape: tuple[int, ...],
        *,
        dtypes: Sequence[torch.dtype] = FLOATS,
        special: Sequence[float] = SPECIAL,
        turned: bool = True,
    ) -> Tensor:
        """Normally distributed values, or few distinct ones with ties; some of them may be special ones."""
        generator = self.generator()
        values = torch.randn(shape, generator=generator)
        if self.flag():
            values = torch.tensor(REPEATED)[torch.randint(len(REPEATED), shape, generator=generator)]
        if special and self.flag():
            chosen = torch.tensor(special)[torch.randint(len(special), shape, generator=generator)]
            values = torch.where(torch.rand(shape, generator=generator) < 0.2, chosen, values)
        return self.laid_out(values.to(self.choice(dtypes)), turned)

    def mask(self, shape: tuple[int, ...]) -> Tensor | None:
        if self.flag():
            return None
        share = self.choice((0.7, 0.1, 0.0, 1.0))
        return self.laid_out(torch.rand(shape, generator=self.generator()) < share)

    def logits(self, columns: int, least_dims: int = 0) -> Tensor:
        """Logits like a model's: in some rows one token is far above the others, and in some all are far from 0."""
        generator, shape = self.generator(), (*self.rows(self.wide(columns), least_dims), columns)
        logits = torch.randn(shape, generator=generator) * self.choice((3.0, 0.1, 30.0))
        flat = logits.view(-1, columns)
        if columns > 0 and self.flag():
            flat[1::4, 0] += 30
            flat[2::4] += 1000
            flat[3::4] -= 1000
        if self.flag():  # some logits become -inf, but never a whole row
            flat[:, 1:][torch.rand(flat[:, 1:].shape, generator=generator) < 0.2] = -math.inf
        if self.rarely():
            logits[torch.rand(shape, generator=generator) < 0.02] = self.choice((math.nan, math.inf, -math.inf))
        return self.laid_out(logits.to(self.choice(FLOATS)), turned=False)

    def labels(self, rows: tuple[int, ...], vocabulary: int) -> Tensor:
        """Draws a label for each row. About one in four rows has no label (-100)."""
        generator = self.generator()
        labels = torch.randint(vocabulary, rows, generator=generator)
        labels[torch.rand(rows, generator=generator) < 0.25] = -100
        return labels.to(self.choice((torch.int64, torch.int32)))

    def spans(
        self,
        rows: int,
        vocabulary: int,
        labels: Tensor | None,
        mask: Tensor | None = None,
        bound: bool = True,
        optional: bool = True,
    ) -> dict[str, Any]:
        """The arguments of a sampling mask. An unsorted span has one, some, all or no tokens. If ``optional``, there is
        often no sampling mask. If ``bound``, ``max_dense_rows`` is sometimes too small.
        """
        if optional and self.flag():
            return {}
        include, generator = labels is not None and self.flag(), self.generator()
        empty, most = self.choice((0.0, 0.3, 1.0)), self.choice((2, 1, 10, vocabulary))
        sizes = torch.randint(1, min(most, vocabulary) + 1, (rows,), generator=generator)
        sizes[torch.rand(rows, generator=generator) < empty] = 0
        spans: list[list[int]] = []
        for row, size in enumerate(sizes.tolist()):
            span = torch.randperm(vocabulary, generator=generator)[:size].tolist()
            label = -100 if labels is None else int(labels.flatten()[row])
            if span and label != -100 and label not in span and not include:
                span[-1] = label
            spans.append(span)
        lengths = [len(span) for span in spans]
        ids, offsets = [token for span in spans for token in span], [0, *accumulate(lengths)]
        counted = [True] * rows if mask is None else mask.flatten().tolist()
        dense = sum(count and not span for count, span in zip(counted, spans, strict=True))
        return {
            "support_ids": torch.tensor(ids + [0] * self.integer(0, 2), dtype=torch.int32),
            "support_offsets": torch.tensor(offsets, dtype=self.choice((torch.int64, torch.int32))),
            **({} if labels is None else {"include_label": include}),
            "max_dense_rows": self.choice((None, dense, dense + 3, max(0, dense - 1) if bound else None)),
        }

    def number_or_tensor(self, value: float, name: str, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
        """One of an op's two arguments for a value: ``name``, a Python number, or ``name_tensor``, a tensor."""
        tensor = torch.tensor(value, dtype=self.choice(dtypes))
        return self.choice(({name: value}, {f"{name}_tensor": tensor}))

    def temperature(self, rows: tuple[int, ...]) -> dict[str, Any]:
        value, kind = self.choice((1.0, 0.7, 0.1, 4.0)), self.choice(("number", "tensor", "of each row"))
        if kind == "number":
            return {"temperature": value}
        each = torch.rand(rows if kind == "of each row" else (), generator=self.generator())
        return {"temperature_tensor": value * (0.5 + each)}
