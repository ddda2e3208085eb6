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
from d3s_kernels import linear_logprob_entropy

H, V = 512, 24_000
WORKSPACE = 8 << 20
SLICE = 8192  # tokens, on a CPU


class Case(NamedTuple):
    rows: int
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    into: bool = False  # weight_grad_into, in float32

    @property
    def several_tiles_of_rows(self) -> bool:
        return 4 * self.rows * SLICE > WORKSPACE

    @property
    def most(self) -> int:
        """Outputs, the workspace, rows, their gradient in float32 and rounded, and slabs of the weight's gradient."""
        size, slab = self.dtype.itemsize, SLICE * H
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
    "tiles of rows too, trained, bfloat16": Case(600, torch.bfloat16),
}


def measure(case: Case) -> int:
    hidden, weight = (torch.randn(length, H).to(case.dtype).requires_grad_() for length in (case.rows, V))
    weight.requires_grad_(not case.frozen)
    into = torch.zeros(V, H) if case.into else None

    def loss(rows: int) -> torch.Tensor:
        labels = torch.arange(rows)
        scores = linear_logprob_entropy(hidden[:rows], weight, labels, workspace_bytes=WORKSPACE, weight_grad_into=into)
        return sum(score.sum() for score in scores)

    wanted = [hidden] if case.frozen or case.into else [hidden, weight]
    torch.autograd.grad(loss(2), wanted)  # starts threads and libraries
    whole = loss(case.rows)
    return growth(lambda: torch.autograd.grad(whole, wanted))


if __name__ == "__main__":
    print(json.dumps({name: measure(case) for name, case in CASES.items()}))
