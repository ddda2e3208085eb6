"""The task: chains of additions, subtractions and multiplications modulo 10, worked out step by step.

A prompt is ``3 + 4 * 2 - 5 :``, computed from left to right. Its answer is
``3 + 4 = 7 ; 7 * 2 = 4 ; 4 - 5 = 9``: each step copies two operands and an operator, and states the result. The start
model has learnt from work in which results are wrong now and then, more often of products. It copies surely and is
unsure of results: its entropy lies on the tokens that decide whether the answer is right.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from operator import add, mul, sub

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NO_SLIPS: Mapping[str, float] = {}
SLIPS = {"+": 0.05, "-": 0.15, "*": 0.3}  # of those whose work the start model has learnt from
OPERATIONS = {"+": add, "-": sub, "*": mul}
SHORT, LONG = range(4, 11), range(11, 15)  # operations of a chain: to train on; longer than all of these
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789+-*=;:"]
STEP_TOKENS = 6  # 3 + 4 = 7 ;


def chain(rng: random.Random, lengths: range, slips: Mapping[str, float] = NO_SLIPS) -> dict[str, str]:
    """A prompt, the work of somebody who slips this often and goes on from the slip, and the right answer."""
    right = found = rng.randrange(10)
    prompt, steps = [str(found)], []
    for _ in range(rng.choice(lengths)):
        sign, operand = rng.choice(list(OPERATIONS)), rng.randrange(10)
        before, found = found, OPERATIONS[sign](found, operand) % 10
        if rng.random() < slips.get(sign, 0.0):
            found = (found + rng.randrange(1, 10)) % 10
        right = OPERATIONS[sign](right, operand) % 10
        prompt += [sign, str(operand)]
        steps.append(f"{before} {sign} {operand} = {found}")
    return {"prompt": f"{' '.join(prompt)} :", "work": " ; ".join(steps), "answer": str(right)}


def chains(count: int, lengths: range, seed: int, without: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """Different chains without slips, none of which has a prompt of ``without``."""
    rng = random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        made = chain(rng, lengths)
        if made["prompt"] not in without:
            found[made["prompt"]] = made
    return list(found.values())


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def longest(lengths: range) -> int:
    """The tokens of the longest answer, its end included."""
    return STEP_TOKENS * lengths[-1]
