"""Pass@1 and Pass@8: eight sampled completions of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .generate import Rollouts, sample
from .problems import Task
from .rewards import ends_in

SAMPLES = 8
AT_A_TIME = 256  # rollouts
SEED = 0  # every evaluation draws with the same random numbers


class Passes(NamedTuple):
    first: float  # Pass@1: the share of right completions
    any: float  # Pass@8: the share of prompts with a right one among eight


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], longest: int) -> Passes:
    random = torch.Generator(model.device).manual_seed(SEED)
    step = max(1, AT_A_TIME // SAMPLES)
    parts = [tasks[first : first + step] for first in range(0, len(tasks), step)]
    right = torch.cat(
        [rewards(sample(model, tokenizer, part, SAMPLES, longest, random), tokenizer, part) for part in parts]
    )
    return Passes(float(right.mean()), float(right.amax(1).mean()))


def rewards(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]) -> torch.Tensor:
    """float32 [tasks, rollouts of a task], on the CPU."""
    texts = tokenizer.batch_decode(rollouts.completion, skip_special_tokens=True)
    count = len(texts) // len(tasks)
    found = [float(ends_in(text, tasks[row // count].answer)) for row, text in enumerate(texts)]
    return torch.tensor(found).view(len(tasks), count)
