"""What there is to learn: the chains of this experiment, or a user's data set."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from . import chains

TRAIN, HELD_OUT, LONGER = 80, 128, 64  # prompts of the chains
CHAINS_SEED = 0  # the prompts are the same in all runs


class Task(NamedTuple):
    prompt: str | list[dict[str, str]]  # a text or a conversation
    answer: str


class Problem(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Task]
    held_out: Sequence[Task]
    longer: Sequence[Task]  # more operations than any prompt of training; empty with a user's data set
    longest: int  # tokens of a completion, in training
    longest_of_longer: int


def of_chains(strict: bool = False) -> Problem:
    """Strict: the answer is the whole work, so that a completion with a wrong step is not right by chance."""
    answer = "work" if strict else "answer"
    held_out = chains.chains(HELD_OUT, chains.SHORT, CHAINS_SEED + 1)
    train = chains.chains(TRAIN, chains.SHORT, CHAINS_SEED, without=prompts_of(held_out))
    longer = chains.chains(LONGER, chains.LONG, CHAINS_SEED + 2)
    return Problem(
        chains.tokenizer(),
        *([Task(made["prompt"], made[answer]) for made in part] for part in (train, held_out, longer)),
        chains.longest(chains.SHORT),
        chains.longest(chains.LONG),
    )


def prompts_of(made: Sequence[dict[str, str]]) -> frozenset[str]:
    return frozenset(chain["prompt"] for chain in made)


def of_user(model: Path, dataset: Path, held_out: int, longest: int) -> Problem:
    """A data set of lines of JSON with ``prompt`` and ``answer``. Every run holds out the same tasks.

    Raises:
        ValueError: a line that cannot be read, or too few lines; the message names the option.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tasks = [task_of(dataset, number, line) for number, line in enumerate(dataset.read_text("utf-8").splitlines(), 1)]
    if len(tasks) < 2 * held_out:
        raise ValueError(f"--held-out: got {held_out}; takes at most half of the {len(tasks)} lines of {dataset}")
    random.Random(CHAINS_SEED).shuffle(tasks)
    return Problem(tokenizer, tasks[held_out:], tasks[:held_out], [], longest, longest)


def task_of(dataset: Path, number: int, line: str) -> Task:
    try:
        row = json.loads(line)
        return Task(row["prompt"], str(row["answer"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--dataset: line {number} of {dataset} is {line[:80]!r}; takes JSON with prompt and answer"
        ) from error
