"""The model that is trained: a small Qwen2 that has begun to learn chains, or a user's model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from . import chains
from .evaluate import evaluate
from .problems import Problem

BETWEEN_CHECKS, MOST_STEPS = 50, 3000  # of supervised training
BATCH, LEARNING_RATE, NO_TARGET = 32, 1e-3, -100
CHECKED = 64  # prompts of a check, eight samples of each


def load(folder: Path, device: torch.device | None = None) -> PreTrainedModel:
    """A model in float32, whose small updates bfloat16 would lose."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def new_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """335,136 parameters."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def warm_up(problem: Problem, seed: int, enough: float, slips: float = 1.0) -> Qwen2ForCausalLM:
    """A model that supervised training has brought to this Pass@1.

    It learns from the work of somebody who slips, ``slips`` times as often as ``chains.SLIPS`` says. The chains have
    the training's lengths and are drawn in every step.
    """
    own_slips = {sign: slips * share for sign, share in chains.SLIPS.items()}
    torch.manual_seed(seed)
    model = new_model(problem.tokenizer)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, MOST_STEPS + 1):
        made = [chains.chain(rng, chains.SHORT, own_slips) for _ in range(BATCH)]
        made.sort(key=lambda chain: len(chain["work"]))
        loss = sum(supervised(model, problem.tokenizer, part) for part in halves(made)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % BETWEEN_CHECKS == 0:
            found = evaluate(model, problem.tokenizer, problem.train[:CHECKED], problem.longest)
            if found.first >= enough:
                return model.eval()
    raise RuntimeError(f"seed {seed}: {MOST_STEPS} supervised steps did not lead to a Pass@1 of {enough}")


def halves(made: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """The short chains and the long ones, so that less is padding."""
    yield made[: len(made) // 2]
    yield made[len(made) // 2 :]


def supervised(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, made: list[dict[str, str]]) -> Tensor:
    """Cross-entropy of the worked answers."""
    texts = [f"{chain['prompt']} {chain['work']} {tokenizer.eos_token}" for chain in made]
    tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    targets = tokens.masked_fill(tokens == tokenizer.pad_token_id, NO_TARGET)
    for row, chain in enumerate(made):
        targets[row, : len(chain["prompt"].split())] = NO_TARGET
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), targets[:, 1:].flatten())
