"""Samples completions of each query, scores them as TRL does, and writes the counts of successes and samples."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerState,
)

from .files import ProfileFile, Record, Row


def profile(options: Namespace, rows: list[Row], reward: Callable[..., Any], file: ProfileFile) -> None:
    """Samples and scores the queries that are not in ``file`` yet."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(options.device).eval()
    sampler = Sampler(
        model,
        AutoTokenizer.from_pretrained(options.model),
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        template=options.chat_template_kwargs,
    )
    samples, batch_size = options.samples, options.batch_size
    # Queries are sampled together in blocks. A query's padding, and so the rounding of its logits, depends on the other
    # queries of its block. So the division into blocks must not depend on which queries are done already.
    block_size = max(1, batch_size // samples)
    with tqdm(total=len(rows), initial=len(file.done), unit="query") as bar:
        for first in range(0, len(rows), block_size):
            block = range(first, min(first + block_size, len(rows)))
            if file.done.issuperset(block):
                continue
            prompts = [sampler.prompt_ids(rows[index]["prompt"]) for index in block]
            drawn: list[list[int]] = []  # ``samples`` completions of each query of the block, in order
            for start in range(0, len(block) * samples, batch_size):
                batch = range(start, min(start + batch_size, len(block) * samples))
                keys = [f"{options.seed}/{block[number // samples]}/{number % samples}" for number in batch]
                drawn += sampler.completions([prompts[number // samples] for number in batch], keys)
            for place, index in enumerate(block):
                if index in file.done:
                    continue
                row, ids = rows[index], drawn[place * samples : (place + 1) * samples]
                rewards = score(reward, row, sampler.as_rewarded(row["prompt"], ids), ids)
                scored = [value for value in rewards if not math.isnan(value)]
                successes = sum(value >= options.threshold for value in scored)
                mean = math.fsum(scored) / len(scored) if scored else None
                file.write(Record(index, successes, len(scored), mean))
                bar.update()


# ---- sampling --------------------------------------------------------------------------------------------------------


class OwnNumbers(LogitsProcessor):
    """Samples a token for each row with the row's own random numbers, and masks all other tokens, so that greedy search
    takes the sampled token.

    ``generate`` itself would draw the tokens of a whole batch from one generator. Then a query's completions would
    depend on the other rows of the batch, and a restart would change the completions.
    """

    def __init__(self, rows: Sequence[random.Random], temperature: float) -> None:
        self.rows, self.temperature = rows, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        reached = (scores.float() / self.temperature).softmax(-1).double().cumsum(-1)
        numbers = torch.tensor([row.random() for row in self.rows], dtype=torch.float64, device=scores.device)
        below_the_sum = numbers.unsqueeze(1) * reached[:, -1:]  # even after rounding: random() is at most 1 - 2^-53
        token = torch.searchsorted(reached, below_the_sum, right=True)  # the first larger sum: the token's p is above 0
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
            do_sample=False,  # OwnNumbers samples
            num_beams=1,
            # Options that are not set here come from the model's configuration, but the profile needs the unmodified
            # policy. Of the next four, greedy search reads only repetition_penalty; the others avoid a warning.
            repetition_penalty=1.0,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            eos_token_id=sorted(self.stops) or None,
            pad_token_id=self.padding,
        )

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Returns the token ids of a prompt, which is text, or messages for the chat template."""
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
        """Returns one completion per prompt, including its end token, sampled with the prompt's key as seed."""
        width = max(map(len, prompts))
        rows = [random.Random(key) for key in keys]
        padded = [[self.padding] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=torch.tensor(padded, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                generation_config=self.config,
                logits_processor=LogitsProcessorList([OwnNumbers(rows, self.temperature)]),
            )
        completions = []
        for ids in output[:, width:].tolist():
            end = next((number for number, token in enumerate(ids, 1) if token in self.stops), len(ids))
            completions.append(ids[:end])
        return completions

    def as_rewarded(self, prompt: Any, ids: Sequence[list[int]]) -> list[Any]:
        """Returns the completions as a reward function gets them: text if the prompt is text, else messages."""
        texts: list[str] = self.tokenizer.batch_decode(list(ids), skip_special_tokens=True)
        return texts if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in texts]


def _ids(tokens: int | Sequence[int] | None) -> set[int]:
    """Returns the set of token ids in a configuration's entry, which may have no id, one id or several ids."""
    if tokens is None:
        return set()
    return {tokens} if isinstance(tokens, int) else set(tokens)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def load_reward(name: str) -> Callable[..., Any]:
    """Loads the function that ``name`` refers to, either as ``module:function`` or as ``file.py:function``."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"reward: got {name!r}; takes 'module:function' or 'file.py:function'")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"reward: there is no file {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None  # since the name ends in .py
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))  # so that the file can import other files of its folder
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not (error.name and f"{place}.".startswith(f"{error.name}.")):
                raise  # the module exists, but one of its own imports is missing
            raise ValueError(f"reward: there is no module {place}") from None
    reward: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(reward):
        raise ValueError(f"reward: {place} has no function {function}")
    return reward


def score(reward: Callable[..., Any], row: Row, completions: Sequence[Any], ids: Sequence[list[int]]) -> list[float]:
    """Returns the reward of each completion of a query. It is NaN if the function gives None ("cannot be scored" in
    TRL).
    """
    count = len(completions)
    not_passed = {"prompt", "completion", "completion_ids"}  # TRL does not pass these columns on either
    rewards = reward(
        prompts=[row["prompt"]] * count,
        completions=list(completions),
        completion_ids=list(ids),
        **{name: [value] * count for name, value in row.items() if name not in not_passed},
        trainer_state=TrainerState(),  # the state before the first step
        log_extra=lambda *_, **__: None,
        log_metric=lambda *_, **__: None,
    )
    if inspect.isawaitable(rewards):

        async def awaited(awaitable: Any) -> Any:  # asyncio.run takes only a coroutine
            return await awaitable

        rewards = asyncio.run(awaited(rewards))
    rewards = [math.nan if reward is None else float(reward) for reward in rewards]
    if len(rewards) != count:
        raise ValueError(f"reward: gave {len(rewards)} rewards; takes one for each of {count} completions")
    return rewards
