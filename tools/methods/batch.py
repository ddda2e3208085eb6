"""The batch that all pictures of docs/methods.md show, with log-probabilities before and after some updates."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import d3s_kernels as d3s

KEEP, RATIO = 3, 0.2
TOKENS = 24

REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],  # all equal: every advantage is 0
        [0.62, 0.10, 0.35, 0.90, 0.41, 0.05, 0.77, 0.48],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
    ]
)
LENGTHS = torch.tensor(
    [
        [212.0, 388.0, 305.0, 154.0, 471.0, 260.0, 347.0, 419.0],
        [98.0, 131.0, 87.0, 164.0, 120.0, 143.0, 109.0, 176.0],
        [240.0, 316.0, 189.0, 402.0, 275.0, 358.0, 221.0, 333.0],
        [512.0, 447.0, 498.0, 380.0, 465.0, 431.0, 509.0, 402.0],
    ]
)
ADVANTAGES = d3s.group_advantages(REWARDS)

# Python's random numbers are the same in all its versions; torch's may change.
_random = random.Random(7)

# Tokens are shown only for every second rollout that D3S keeps.
_kept = d3s.select_rollouts(ADVANTAGES, KEEP)
TOKEN_ADVANTAGES = ADVANTAGES[_kept][1::2]
SEQUENCES = len(TOKEN_ADVANTAGES)
TOKEN_MASK = torch.arange(TOKENS) < torch.tensor([24, 17, 22, 24, 20, 13]).unsqueeze(-1)


def _like_a_models() -> float:
    """A random entropy in nats, similar to a model's: near 0 for most tokens, large for a few."""
    return 2.8 * _random.random() ** 6 + 0.002


ENTROPY = torch.tensor([[_like_a_models() for _ in range(TOKENS)] for _ in range(SEQUENCES)]) * TOKEN_MASK
GROUPS = d3s.entropy_groups(ENTROPY, TOKEN_MASK)


def moved() -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens after and before some updates.

    Tokens with high entropy move more. Over the thousands of tokens of a real sequence these moves nearly cancel. These
    short sequences are shifted so that the moves in each entropy group have a small mean in the advantage's direction.
    """
    old = -ENTROPY - 0.01
    shift = torch.tensor([[_random.gauss(0, 1) for _ in range(TOKENS)] for _ in range(SEQUENCES)])
    shift = shift * (0.002 + 0.13 * ENTROPY)
    for row, groups, advantage in zip(shift, GROUPS, TOKEN_ADVANTAGES.tolist(), strict=True):
        for group, rest in enumerate((2e-5, 2.5e-3) if advantage > 0 else (-1.2e-4, -7e-4)):
            row[groups == group] += rest - row[groups == group].mean()
    return old + shift, old
