"""Prints, as JSON, the peak memory of the LM head's backward on this CPU beyond its inputs, in bytes, by case.

A process of its own, since a process's peak can only rise until it is reset. (tests/test_head_memory.py runs it.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))  # last: d3s_kernels may be installed
from benchmarks.memory import growth
from d3s_kernels import SamplingMask, linear_logprob_entropy

H, V = 512, 17_000
WORKSPACE = 8 << 20
SLICE = 8192  # tokens, on a CPU
BYTES_OF_AN_ID = 28  # of a sampling mask


class Case(NamedTuple):
    rows: int
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    into: bool = False  # weight_grad_into, in float32
    kept: int | None = None  # tokens of each row that a sampling mask keeps

    @property
    def several_tiles_of_rows(self) -> bool:
        return 4 * self.rows * SLICE > WORKSPACE

    @property
    def most(self) -> int:
        """Outputs, the workspace, rows, their gradient in float32 and rounded, and slabs of the weight's gradient."""
        size, slab = self.dtype.itemsize, SLICE * H
        if self.kept is not None:  # nothing is as large as the vocabulary, and no matrix has rows and tokens
            return self.rows * (2 * (4 + size) * H + BYTES_OF_AN_ID * self.kept)
        outputs = size * self.rows * H + (0 if self.frozen or self.into else size * V * H)
        of_rows = (4 + 2 * size) * self.rows * H
        product = 0 if self.frozen else max(4, size) * slab  # of a tile, before it is added
        total = 4 * slab if self.several_tiles_of_rows and size == 2 and not self.frozen else 0
        return outputs + WORKSPACE + of_rows + product + total


CASES = {
    "slabs of tokens, trained": Case(200),
    "slabs of tokens, added": Case(200, into=True),
    "tiles of rows too, frozen": Case(600, frozen=True),
    "tiles of rows too, trained": Case(600),
    "tiles of rows too, added": Case(600, into=True),
    "tiles of rows too, trained, bfloat16": Case(300, torch.bfloat16),
    "slabs of tokens, trained, float16": Case(200, torch.float16),
    # All ids are in one tile, whose product is as large as the weight's gradient.
    "few rows, added": Case(100, into=True),
    "few rows, added, bfloat16": Case(100, torch.bfloat16, into=True),
    "few kept tokens": Case(600, into=True, kept=10),
    "many kept tokens": Case(600, into=True, kept=1000),
    "few kept tokens, bfloat16": Case(2000, torch.bfloat16, into=True, kept=10),
    "few kept tokens, frozen": Case(2000, frozen=True, kept=10),
}


def measure(case: Case) -> int:
    hidden, weight = (torch.randn(length, H).to(case.dtype).requires_grad_() for length in (case.rows, V))
    weight.requires_grad_(not case.frozen)
    into = torch.zeros(V, H) if case.into else None

    def loss(rows: int) -> torch.Tensor:
        labels = torch.arange(rows)
        options = {"workspace_bytes": WORKSPACE, "weight_grad_into": into}
        if case.kept is not None:
            ids = (labels.unsqueeze(1) + torch.arange(case.kept)).int()  # a label and the tokens after it
            options |= {"sampling_mask": SamplingMask.from_padded(ids), "max_dense_rows": 0}
        scores = linear_logprob_entropy(hidden[:rows], weight, labels, **options)
        return sum(score.sum() for score in scores)

    wanted = [hidden] if case.frozen or case.into else [hidden, weight]
    torch.autograd.grad(loss(2), wanted)  # starts threads and libraries
    whole = loss(case.rows)
    return growth(lambda: torch.autograd.grad(whole, wanted))


if __name__ == "__main__":
    print(json.dumps({name: measure(case) for name, case in CASES.items()}))
