"""Samples completions with random numbers that depend on the query and the sample, but not on the batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList


class OwnNumbers(LogitsProcessor):
    """Samples a token for each row with the row's own random numbers, and masks all others for greedy search.

    ``generate`` itself draws a whole batch from one generator: a query's completions would depend on the other rows of
    its batch, and would change after a restart.
    """

    def __init__(self, rows: Sequence[random.Random], temperature: float) -> None:
        self.rows, self.temperature = rows, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        reached = (scores.float() / self.temperature).softmax(-1).double().cumsum(-1)
        numbers = torch.tensor([row.random() for row in self.rows], dtype=torch.float64, device=scores.device)
        below_the_sum = numbers.unsqueeze(1) * reached[:, -1:]  # even when rounded: random() is at most 1 - 2^-53
        token = torch.searchsorted(reached, below_the_sum, right=True)  # first sum above it: its probability is not 0
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0)


class Sampler:
    """A model with the settings for sampling completions from it."""

    def __init__(
        self, model: Any, tokenizer: Any, *, temperature: float, max_new_tokens: int, template: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.temperature, self.template = model, tokenizer, temperature, template
        self.stops = _ids(model.generation_config.eos_token_id) | _ids(tokenizer.eos_token_id)
        self.padding = min(_ids(tokenizer.pad_token_id) or self.stops or {0})
        self.config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens,
            do_sample=False,  # OwnNumbers does
            num_beams=1,
            # Options left out would come from the model's configuration, but the profile needs the unmodified policy.
            # Greedy search reads only repetition_penalty. The other three are set to avoid a warning about the model's.
            repetition_penalty=1.0,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            eos_token_id=sorted(self.stops) or None,
            pad_token_id=self.padding,
        )

    def prompt_ids(self, prompt: Any) -> list[int]:
        """The token ids of a prompt: of text, or of messages through the chat template."""
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer(text=prompt)["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **self.template
            )["input_ids"]
        if not ids:
            raise ValueError(f"dataset: the prompt {prompt!r} has no tokens")
        return ids

    def completions(self, prompts: Sequence[list[int]], keys: Iterable[str]) -> list[list[int]]:
        """One completion for each prompt, sampled with the key as its seed, including the token that ends it."""
        width = max(map(len, prompts))
        rows = [random.Random(key) for key in keys]
        padded = [[self.padding] * (width - len(ids)) + ids for ids in prompts]
        read = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=torch.tensor(padded, device=self.model.device),
                attention_mask=torch.tensor(read, device=self.model.device),
                generation_config=self.config,
                logits_processor=LogitsProcessorList([OwnNumbers(rows, self.temperature)]),
            )
        return [self._until_stop(ids) for ids in output[:, width:].tolist()]

    def as_rewarded(self, prompt: Any, ids: Sequence[list[int]]) -> list[Any]:
        """The completions of ``prompt`` in the form that a reward function gets: text, or a message."""
        texts: list[str] = self.tokenizer.batch_decode(list(ids), skip_special_tokens=True)
        return texts if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in texts]

    def _until_stop(self, ids: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(ids, 1) if token in self.stops), len(ids))
        return ids[:end]


def _ids(tokens: int | Sequence[int] | None) -> set[int]:
    """The token ids of a configuration, which may have none, one or several."""
    if tokens is None:
        return set()
    return {tokens} if isinstance(tokens, int) else set(tokens)
