"""Rollouts, generated once and recorded, so that every trainer gets the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from .problems import Problem, is_right


@dataclass(frozen=True)
class Recorded:
    """The rollouts of each problem, one after the other."""

    problems: list[Problem]
    prompts: list[list[int]]  # token ids of each problem
    completions: list[list[int]]  # token ids of each rollout, with the end token if it has one
    texts: list[str]
    rewards: Tensor  # [problems, group]

    @property
    def group(self) -> int:
        return len(self.completions) // len(self.problems)

    def generated(self, chats: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: the recorded rollouts, for the chats that the trainer asks for."""
        number = {problem.question: place for place, problem in enumerate(self.problems)}
        given = dict.fromkeys(number, 0)
        rows = []
        for chat in chats:
            question = chat[-1]["content"]
            rows.append(number[question] * self.group + given[question] % self.group)
            given[question] += 1
        prompts = [self.prompts[row // self.group] for row in rows]
        return {"prompt_ids": prompts, "completion_ids": [self.completions[row] for row in rows], "logprobs": None}


def record(
    model: Any, tokenizer: Any, problems: list[Problem], group: int, length: int, advance: Callable[[], None]
) -> Recorded:
    """Samples `group` answers of at most `length` tokens to each problem, at temperature 1, from all tokens."""
    chats = [
        tokenizer.apply_chat_template(problem.chat, tokenize=False, add_generation_prompt=True) for problem in problems
    ]
    inputs = tokenizer(chats, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    inputs = inputs.to(model.device)
    tokens = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=group,
        max_new_tokens=length,
        stopping_criteria=StoppingCriteriaList([_EveryToken(advance)]),
    )
    width = inputs.input_ids.shape[1]
    completions = [up_to(row, tokenizer.eos_token_id) for row in tokens[:, width:].tolist()]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = [float(is_right(text, problems[row // group].answer)) for row, text in enumerate(texts)]
    prompts = [row[mask.bool()].tolist() for row, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)]
    return Recorded(problems, prompts, completions, texts, torch.tensor(rewards).view(-1, group))


def up_to(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


class _EveryToken(StoppingCriteria):
    """Calls a function after every token; stops nothing."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self.advance = advance

    def __call__(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        self.advance()
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
