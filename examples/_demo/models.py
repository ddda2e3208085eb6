"""The model of the demo: from a folder; or, where there is none, a tiny one that is made and trained on the spot."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from .problems import GAINS, LOSSES, NAMES, THINGS, Problem, draw

LARGEST = 20  # the largest number that the tiny model has a token for
STEPS, ROWS = 250, 64  # of its training
GUESSES = 0.6  # share of the training answers that guess the result


def from_folder(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def made_here(seed: int, advance: Callable[[], None], steps: int = STEPS) -> tuple[Any, Any]:
    """A tiny model that solves some of the problems, and its tokenizer. Calls `advance` after every training step."""
    torch.manual_seed(seed)
    tokenizer = words_as_tokens()
    model = tiny_model(tokenizer)
    random_ = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20, 2 * (steps - i) / steps))
    for _ in range(steps):
        inputs, labels = lessons(tokenizer, random_)
        loss = F.cross_entropy(model(input_ids=inputs[:, :-1]).logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        advance()
    return model, tokenizer


def words_as_tokens() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word of the problems. Of a chat, it gives the model only the last message."""
    every = [Problem(name, thing, verb, 2, 1) for name in NAMES for thing in THINGS for verb in (*GAINS, *LOSSES)]
    text = " ".join(f"{problem.question} {problem.solution}" for problem in every)
    numbers = map(str, range(LARGEST + 1))
    words = dict.fromkeys(["<pad>", "<end>", "<unknown>", *numbers, *re.findall(r"\w+|[^\w\s]+", text)])
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        chat_template="{{ messages[-1]['content'] }}",
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def lessons(tokenizer: PreTrainedTokenizerFast, random_: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Problems with a solution, or with a guess; labels are -100 in the problem and in padding."""
    problems = [draw(random_) for _ in range(ROWS)]
    questions = [tokenizer(problem.question).input_ids for problem in problems]
    answers = [[*tokenizer(lesson(problem, random_)).input_ids, tokenizer.eos_token_id] for problem in problems]
    length = max(len(question) + len(answer) for question, answer in zip(questions, answers, strict=True))
    inputs = torch.full((ROWS, length), tokenizer.pad_token_id)
    labels = torch.full((ROWS, length), -100)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        inputs[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        labels[row, len(question) : len(question) + len(answer)] = torch.tensor(answer)
    return inputs, labels


def lesson(problem: Problem, random_: random.Random) -> str:
    if random_.random() >= GUESSES:
        return problem.solution
    guess = min(max(0, problem.answer + random_.randint(-2, 2)), LARGEST)
    return random_.choice([f"the answer is {guess}.", f"{problem.name} has now {guess} {problem.thing}, "
                           f"the answer is {guess}."])  # fmt: skip
