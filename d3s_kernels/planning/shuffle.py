"""Random orders that are the same on every machine and with every version of the libraries."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def shuffled(count: int, *key: object) -> Tensor:
    """The numbers below ``count``, int64, in a random order seeded by ``key``.

    A restart needs the same order again, perhaps under newer libraries. Python guarantees the same numbers from
    ``random()`` in every release; torch and NumPy give no such guarantee for their permutations.
    """
    generator = random.Random("/".join(map(str, key)))
    drawn = [generator.random() for _ in range(count)]
    return torch.tensor(drawn, dtype=torch.float64).argsort(stable=True)
