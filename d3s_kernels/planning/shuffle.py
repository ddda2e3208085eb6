"""Orders drawn at random that are the same everywhere and stay so."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def shuffled(count: int, *key: object) -> Tensor:
    """The numbers below ``count``, int64, in an order drawn by ``key``.

    A restart has to find the order it left, perhaps under newer libraries. Python promises that ``random()`` gives the
    same numbers in every release; torch and NumPy promise nothing of the kind for their permutations.
    """
    generator = random.Random("/".join(map(str, key)))
    drawn = [generator.random() for _ in range(count)]
    return torch.tensor(drawn, dtype=torch.float64).argsort(stable=True)
