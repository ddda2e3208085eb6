"""Lengths, rewards and entropies of a real model's answers, in the sizes of a contest; and lengths of TRL's benchmark.

`recorded.json` has 64 answers of at most 128 tokens, which SmolLM2-135M gave to eight word problems of the demo. The
problems were drawn, and the answers were sampled, with the seed in the file (`draw` and `record` in examples/_demo).
Answers of a model with random weights would not be suitable. All their tokens would have nearly the same entropy, so
|advantage| x entropy would rank tokens by their rollout. Also, all answers would be as long as the limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import d3s_kernels as d3s

FILE = Path(__file__).with_name("recorded.json")
LEVELS = 1_000  # levels are entropies in hundredths of a nat, below 10 nats
LIMIT_6092 = 4_096  # the most tokens of an answer in the benchmark of trl#6092


@cache
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Answers:
    """The answers of whole groups, as columns of a generation batch. Each answer is one row, padded on the right."""

    mask: Tensor  # bool [rows, completion]
    levels: Tensor  # entropies in hundredths of a nat, int64 [rows, completion]
    advantages: Tensor  # float32 [rows]


def answers(rows: int, completion: int, given: Tensor | None = None) -> Answers:
    """The first `rows` answers; their lengths are recorded for a limit of 128 tokens and scaled to `completion`.

    The entropies of an answer are repeated in order until the answer is long enough. For example, with `completion` =
    1,024 instead of 128, an answer of 42 tokens becomes an answer of 336 tokens, which has the same 42 entropies eight
    times. With `given` lengths, the answers have these lengths instead of the recorded lengths.
    """
    groups = recorded()["groups"]
    size = len(groups[0]["answers"])
    if rows % size or rows > size * len(groups):
        raise ValueError(f"rows: got {rows}; takes a multiple of {size}, at most {size * len(groups)}")
    chosen = groups[: rows // size]
    rewards = torch.tensor([[float(answer["reward"]) for answer in group["answers"]] for group in chosen])
    each = [torch.tensor(answer["entropy"]) for group in chosen for answer in group["answers"]]
    lengths = torch.tensor([len(levels) for levels in each])
    scaled = given
    if scaled is None:
        scaled = (lengths * completion / recorded()["limit"]).round().long().clamp(min=1)
    place = torch.arange(completion)
    levels = torch.stack([levels[place % len(levels)] for levels in each])
    return Answers(place < scaled.unsqueeze(1), levels, d3s.group_advantages(rewards).flatten())


def lengths_of_6092(rows: int, completion: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The lengths of prompts and of answers as in the benchmark of trl#6092, scaled from 4,096 tokens to `completion`.

    In that benchmark, an answer's length is log-normal, with median 700 and sigma 0.9, and one answer in ten is cut off
    at 4,096 tokens. The rollouts of a group share a prompt. The median length of prompts is 256; the sigma of prompts
    is not published. With a sigma of 0.55, prompt and answer together have the published mean length, 1,597. The
    lengths are evenly spaced quantiles in random order, since a few draws may be far from the distribution.
    """

    def log_normal(number: int, median: float, sigma: float) -> Tensor:
        return median * (sigma * torch.special.ndtri((torch.arange(number) + 0.5) / number)).exp()

    def in_random_order(lengths: Tensor) -> Tensor:
        scaled = (lengths * completion / LIMIT_6092).round().long().clamp(1, completion)
        return scaled[torch.randperm(len(scaled), generator=generator)]

    cut_off, group = round(rows / 10), len(recorded()["groups"][0]["answers"])
    lengths = torch.cat([log_normal(rows - cut_off, 700, 0.9), torch.full((cut_off,), float(LIMIT_6092))])
    prompts = in_random_order(log_normal(rows // group, 256, 0.55))
    return prompts.repeat_interleave(group), in_random_order(lengths)


def tokens_of(levels: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Random tokens from which :func:`entropy_of` reads the levels again."""
    turns = torch.randint(vocabulary // LEVELS, levels.shape, generator=generator)
    return turns * LEVELS + levels


def entropy_of(tokens: Tensor) -> Tensor:
    """The recorded entropies, in nats, of tokens that :func:`tokens_of` made."""
    return (tokens % LEVELS).float() / 100
