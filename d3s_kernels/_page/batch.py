"""The arguments of a page, checked, as plain Python values of each rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .render import Group, Rollout
from .text import token_texts

Completions = Tensor | Sequence[Sequence[str]]


def grouped(prompts: Sequence[str], rollouts: list[Rollout]) -> list[Group]:
    """The rollouts of each prompt."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(f"prompts: got {prompts!r:.80}; takes a list of texts")
    if not prompts or len(rollouts) % len(prompts):
        raise ValueError(f"prompts: got {len(prompts)} for {len(rollouts)} rollouts; takes a number that divides them")
    size = len(rollouts) // len(prompts)
    return [Group(prompt, rollouts[place * size : (place + 1) * size]) for place, prompt in enumerate(prompts)]


def rollouts_of(
    completions: Completions,
    kept_tokens: Tensor,
    entropy: Tensor | None,
    advantages: Tensor | None,
    scores: Tensor | None,
    kept_rollouts: Tensor | None,
    rewards: Tensor | None,
    mask: Tensor | None,
    tokenizer: Any,
) -> list[Rollout]:
    """The rollouts of a batch. The arguments are those of :func:`d3s_kernels.selection_page`."""
    if scores is None and (entropy is None or advantages is None):
        raise ValueError("scores: got None without entropy and advantages; takes a tensor, or both of these instead")
    texts = _texts(completions, mask, tokenizer)
    kept = [keep is not False for keep in _per_rollout("kept_rollouts", kept_rollouts, len(texts), _BOOL)]
    lengths = [len(row) if keep else 0 for row, keep in zip(texts, kept, strict=True)]
    tokens = _per_token("kept_tokens", kept_tokens, lengths, kept, _BOOL)
    _require_all_within(kept_tokens, tokens)
    weights = _per_rollout("advantages", advantages, len(texts), _FLOAT)
    entropies: list[Any] = [None] * len(texts)
    if entropy is not None:
        entropies = _per_token("entropy", entropy, lengths, kept, _FLOAT)
    if scores is not None:
        shown = _per_token("scores", scores, lengths, kept, _FLOAT)
    else:
        shown = [[abs(weight) * each for each in row] for weight, row in zip(weights, entropies, strict=True)]
    of_rewards = _per_rollout("rewards", rewards, len(texts), _FLOAT)
    values = zip(texts, of_rewards, weights, kept, shown, entropies, tokens, strict=True)
    return [Rollout(*each) for each in values]


# ---- what an argument has to be --------------------------------------------------------------------------------------

_Kind = tuple[str, Callable[[Tensor], bool]]
_BOOL: _Kind = "bool", lambda value: value.dtype == torch.bool
_FLOAT: _Kind = "float", Tensor.is_floating_point


def _require(name: str, value: Tensor, kind: _Kind) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; takes a {kind[0]} tensor")
    if not kind[1](value):
        raise TypeError(f"{name}: got {value.dtype}; takes a {kind[0]} tensor")


def _per_rollout(name: str, value: Tensor | None, count: int, kind: _Kind) -> list[Any]:
    """One value of each rollout; None for each where the argument is None."""
    if value is None:
        return [None] * count
    _require(name, value, kind)
    if value.numel() != count:
        raise ValueError(f"{name}: got shape {list(value.shape)}; takes one value for each of {count} rollouts")
    values: list[Any] = value.flatten().tolist()
    return values


def _per_token(name: str, value: Tensor, lengths: list[int], kept: list[bool], kind: _Kind) -> list[list[Any]]:
    """The values of each rollout's tokens, with no tokens of a dropped rollout; from rows for all rollouts, or for the
    kept ones only.
    """
    _require(name, value, kind)
    longest, every, some = max(lengths, default=0), len(kept), sum(kept)
    if value.dim() != 2 or len(value) not in (every, some) or value.shape[1] < longest:
        number = str(every) if some == every else f"{every}, or {some} (kept rollouts only),"
        raise ValueError(f"{name}: got shape {list(value.shape)}; takes {number} rows of {longest} tokens")
    rows = iter(value.tolist())
    return [
        next(rows)[:length] if keep or len(value) == every else [] for length, keep in zip(lengths, kept, strict=True)
    ]


def _require_all_within(kept_tokens: Tensor, shown: list[list[bool]]) -> None:
    beyond = int(kept_tokens.sum()) - sum(map(sum, shown))
    if beyond:
        raise ValueError(
            f"kept_tokens: got {beyond} in dropped rollouts or after the end of a completion; takes none there"
        )


# ---- completions -----------------------------------------------------------------------------------------------------


def _texts(completions: Completions, mask: Tensor | None, tokenizer: Any) -> list[list[str]]:
    """The text of each token of each completion."""
    if not isinstance(completions, Tensor):
        rows = [list(row) for row in completions]
        if isinstance(completions, str) or not all(isinstance(text, str) for row in rows for text in row):
            raise TypeError("completions: got other values than texts; takes for each rollout a list of token texts")
        lengths = _lengths(mask, [len(row) for row in rows])
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
    if completions.dim() != 2 or completions.is_floating_point() or completions.dtype == torch.bool:
        raise TypeError(
            f"completions: got {completions.dtype} of shape {list(completions.shape)}; takes integers [rollouts, "
            "tokens], or for each rollout a list of token texts"
        )
    if not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer: got {type(tokenizer).__name__} with token ids; takes one with the method decode")

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    lengths = _lengths(mask, [completions.shape[1]] * len(completions))
    return [token_texts(decode, row[:length]) for row, length in zip(completions.tolist(), lengths, strict=True)]


def _lengths(mask: Tensor | None, widths: list[int]) -> list[int]:
    """The number of tokens in each row, from a mask that is non-zero at the first ones."""
    if mask is None:
        return widths
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: got {type(mask).__name__}; takes a tensor or None")
    if mask.dim() != 2 or len(mask) != len(widths):
        raise ValueError(f"mask: got shape {list(mask.shape)}; takes [{len(widths)}, {max(widths, default=0)}]")
    valid = (mask != 0).tolist()
    lengths = [sum(row) for row in valid]
    for place, (row, length, width) in enumerate(zip(valid, lengths, widths, strict=True)):
        if length > width or not all(row[:length]):
            raise ValueError(
                f"mask: got row {place} with a token after the end of its completion; takes non-zero values, then zeros"
            )
    return lengths
