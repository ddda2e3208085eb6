"""The example's own task: to add two numbers below 100, digit by digit; and a small Qwen2 that can partly do it.

A question is "4 7 + 3 8 :". A careful answer is "well work 7 8 1 5 , 4 3 0 8 = 0 8 5": a free word, the method, the
ones with their sum, the tens with their sum and carry, the result. The warm-up trains on the answers of a careless
pupil, who often guesses and sometimes makes mistakes in a sum. The model then is sure of some tokens (copied digits,
commas) and unsure of others (the first word). A few tokens decide its reward: the method and each sum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LARGEST = 99

# How often the pupil works out the sum after each first word; otherwise the pupil guesses.
WORKS_AFTER = {"well": 0.7, "so": 0.6, "okay": 0.5, "hmm": 0.4, "oh": 0.3, "easy": 0.2}
SLIPS = 0.25  # probability of a mistake in a sum of two digits
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789+:,=", "work", "guess", *WORKS_AFTER]

NO_TARGET = -100


def question(a: int, b: int) -> str:
    return f"{digits(a, 2)} + {digits(b, 2)} :"


def answer(total: int) -> str:
    """The end of a right completion."""
    return f"= {digits(total, 3)}"


def digits(number: int, count: int) -> str:
    return " ".join(str(number).zfill(count))


def numbers(question: str) -> tuple[int, int]:
    a, b = (int(part.replace(" ", "")) for part in question.removesuffix(" :").split("+"))
    return a, b


def pupils_work(a: int, b: int, rng: random.Random) -> str:
    word = rng.choice(list(WORKS_AFTER))
    if rng.random() > WORKS_AFTER[word]:
        total = min(max(0, a + b + round(rng.gauss(0, 12))), 2 * LARGEST)
        return f"{word} guess {answer(total)}"
    ones = slip(a % 10 + b % 10, rng)
    tens = slip(a // 10 + b // 10 + ones // 10, rng)
    work = f"{a % 10} {b % 10} {digits(ones, 2)} , {a // 10} {b // 10} {digits(tens, 2)}"
    return f"{word} work {work} {answer(10 * tens + ones % 10)}"


def slip(number: int, rng: random.Random) -> int:
    return min(max(0, number + rng.choice([-1, 1])), 19) if rng.random() < SLIPS else number


def table() -> Dataset:
    """All possible questions, with their answers."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    return Dataset.from_dict({"prompt": [question(*p) for p in pairs], "answer": [answer(sum(p)) for p in pairs]})


def new_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        **ends,
    )
    return Qwen2ForCausalLM(config)


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, train: Dataset, seed: int, steps: int, batch: int = 64
) -> Iterator[float]:
    """Supervised training on the pupil's answers; yields the loss after every step."""
    rng = random.Random(seed)
    prompts = train["prompt"][:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20, (steps - i) / (0.4 * steps)))
    model.train()
    for _ in range(steps):
        chosen = rng.choices(prompts, k=batch)
        texts = [f"{prompt} {pupils_work(*numbers(prompt), rng)} <eos>" for prompt in chosen]
        tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
        labels = tokens.masked_fill(tokens == tokenizer.pad_token_id, NO_TARGET)
        labels[:, : len(chosen[0].split())] = NO_TARGET  # the prompt
        loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        yield loss.item()
