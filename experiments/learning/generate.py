"""Sampling of completions, with a cache of keys and values. Finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .problems import Task


class Rollouts(NamedTuple):
    """Prompts are padded on the left, completions on the right. Shapes: [rollouts, columns]."""

    prompt: Tensor  # int64
    prompt_mask: Tensor  # bool
    completion: Tensor  # int64; the token that ends a completion is its last one
    completion_mask: Tensor  # bool
    logprob: Tensor  # float32: of the completion's tokens, under the model that sampled them

    def rows(self, which: Tensor) -> Rollouts:
        """These rows, without the columns that are padding in all of them."""
        own = Rollouts(*(tensor[which] for tensor in self))
        before, after = own.prompt_mask.any(0), own.completion_mask.any(0)
        return Rollouts(*(tensor[:, before] for tensor in own[:2]), *(tensor[:, after] for tensor in own[2:]))

    def lengths(self) -> Tensor:
        """Tokens of each rollout, its prompt included."""
        return self.prompt_mask.sum(1) + self.completion_mask.sum(1)


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    count: int,
    longest: int,
    random: torch.Generator,
) -> Rollouts:
    """``count`` rollouts of each task, one task after the other."""
    texts = [as_text(task.prompt, tokenizer) for task in tasks]
    made = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    prompt = made.input_ids.repeat_interleave(count, 0)
    return generate(model, prompt, made.attention_mask.repeat_interleave(count, 0).bool(), longest, tokenizer, random)


def as_text(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a prompt, which may be a conversation."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompt: Tensor,
    prompt_mask: Tensor,
    longest: int,
    tokenizer: PreTrainedTokenizerBase,
    random: torch.Generator,
) -> Rollouts:
    """Samples a completion of at most ``longest`` tokens for each row: at temperature 1, from the whole vocabulary."""
    end = tokenizer.eos_token_id
    completion = prompt.new_full((len(prompt), longest), tokenizer.pad_token_id)
    completion_mask = torch.zeros_like(completion, dtype=torch.bool)
    logprob = torch.zeros_like(completion, dtype=torch.float32)
    going = torch.arange(len(prompt), device=prompt.device)  # the rows that have not ended
    cache, tokens, seen = DynamicCache(), prompt, prompt_mask
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
    for column in range(longest):
        logits = model(
            input_ids=tokens,
            attention_mask=seen.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        probabilities = torch.softmax(logits.float(), -1)
        drawn = torch.multinomial(probabilities, 1, generator=random).squeeze(1)
        completion[going, column] = drawn
        logprob[going, column] = probabilities.gather(1, drawn.unsqueeze(1)).squeeze(1).log()
        completion_mask[going, column] = True
        goes_on = (drawn != end).nonzero().squeeze(1)
        if len(goes_on) == 0:
            break
        if len(goes_on) < len(going):
            cache.batch_select_indices(goes_on)
            going, seen, positions = going[goes_on], seen[goes_on], positions[goes_on]
        tokens = drawn[goes_on].unsqueeze(1)
        seen = torch.cat([seen, torch.ones_like(tokens, dtype=torch.bool)], 1)
        positions = positions[:, -1:] + 1
    return Rollouts(prompt, prompt_mask, completion, completion_mask, logprob).rows(torch.arange(len(prompt)))
