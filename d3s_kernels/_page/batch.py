"""Checks the arguments of a page and converts them to plain Python values for each rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import as_bool, require_plain
from .render import Group, Rollout
from .text import decoder, token_texts

Completions = Tensor | Sequence[Sequence[str]]


def grouped(prompts: Sequence[str], rollouts: list[Rollout]) -> list[Group]:
    """The rollouts of each prompt."""
    if not _is_list(prompts) or not all(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(f"prompts: got {_brief(prompts)}; takes a list of texts")
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
    texts, counts = _texts(completions, mask, tokenizer)
    # Without kept_rollouts every value is None, which counts as kept.
    kept = [keep is not False for keep in _per_rollout("kept_rollouts", kept_rollouts, len(texts), _BOOL)]
    lengths = [len(row) if keep else 0 for row, keep in zip(texts, kept, strict=True)]
    tokens = _per_token("kept_tokens", kept_tokens, lengths, kept, _BOOL)
    _require_countable(kept_tokens, tokens, counts)
    weights = _per_rollout("advantages", advantages, len(texts), _FLOAT)
    entropies: list[Any] = [None] * len(texts)
    if entropy is not None:
        entropies = _per_token("entropy", entropy, lengths, kept, _FLOAT)
    if scores is not None:
        shown = _per_token("scores", scores, lengths, kept, _FLOAT)
    else:
        shown = [
            [abs(weight) * each if weight else 0.0 for each in row]
            for weight, row in zip(weights, entropies, strict=True)
        ]
    of_rewards = _per_rollout("rewards", rewards, len(texts), _FLOAT)
    values = zip(texts, counts, of_rewards, weights, kept, shown, entropies, tokens, strict=True)
    return [Rollout(*each) for each in values]


# ---- what an argument has to be --------------------------------------------------------------------------------------


def _float(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        raise TypeError(f"{name}: got {value.dtype}; takes a float tensor")
    return value


_Kind = tuple[str, Callable[[str, Tensor], Tensor]]
"""The name of a kind of tensor, and the function that checks and converts a tensor to it."""
_BOOL: _Kind = "bool", as_bool
_FLOAT: _Kind = "float", _float


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _brief(value: Any) -> str:
    """The start of a wrong argument, with its type."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def _tensor(name: str, value: Tensor, kind: _Kind) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; takes a {kind[0]} tensor")
    require_plain(**{name: value})
    return kind[1](name, value)


def _per_rollout(name: str, value: Tensor | None, count: int, kind: _Kind) -> list[Any]:
    """One value of each rollout; None for each where the argument is None."""
    if value is None:
        return [None] * count
    value = _tensor(name, value, kind)
    if value.numel() != count:
        raise ValueError(f"{name}: got shape {list(value.shape)}; takes one value for each of {count} rollouts")
    values: list[Any] = value.flatten().tolist()
    return values


def _per_token(name: str, value: Tensor, lengths: list[int], kept: list[bool], kind: _Kind) -> list[list[Any]]:
    """The values of each rollout's tokens; none for a dropped rollout. ``value`` has a row for each rollout, or for
    each kept one.
    """
    value = _tensor(name, value, kind)
    longest, every, some = max(lengths, default=0), len(kept), sum(kept)
    if value.dim() != 2 or len(value) not in (every, some) or value.shape[1] < longest:
        number = str(every) if some == every else f"{every}, or {some} (kept rollouts only),"
        raise ValueError(f"{name}: got shape {list(value.shape)}; takes {number} rows of {longest} tokens")
    rows = iter(value.tolist())
    return [
        next(rows)[:length] if keep or len(value) == every else [] for length, keep in zip(lengths, kept, strict=True)
    ]


def _require_countable(kept_tokens: Tensor, shown: list[list[bool]], counts: list[list[bool]]) -> None:
    """Refuses kept tokens in dropped rollouts or where the mask is 0."""
    fitting = sum(
        keep and count
        for row, flags in zip(shown, counts, strict=True)
        for keep, count in zip(row, flags, strict=False)
    )
    beyond = int(kept_tokens.count_nonzero()) - fitting
    if beyond:
        raise ValueError(f"kept_tokens: got {beyond} in dropped rollouts or where mask is 0; takes none there")


# ---- completions -----------------------------------------------------------------------------------------------------

_TAKES = "takes integers [rollouts, tokens] with a tokenizer, or for each rollout a list of token texts"


def _texts(completions: Completions, mask: Tensor | None, tokenizer: Any) -> tuple[list[list[str]], list[list[bool]]]:
    """The text of each token of each completion, and whether the mask counts it."""
    if not isinstance(completions, Tensor):
        if not _is_list(completions) or not all(_is_list(row) for row in completions):
            raise TypeError(f"completions: got {_brief(completions)}; {_TAKES}")
        texts = [list(row) for row in completions]
        wrong = next((text for row in texts for text in row if not isinstance(text, str)), None)
        if wrong is not None:
            raise TypeError(f"completions: got a list with {_brief(wrong)}; {_TAKES}")
        flags = _flags(mask, [len(row) for row in texts])
        return texts, [row[: len(text)] for row, text in zip(flags, texts, strict=True)]
    require_plain(completions=completions)
    whole = not (completions.is_floating_point() or completions.is_complex() or completions.dtype == torch.bool)
    if completions.dim() != 2 or not whole:
        raise TypeError(f"completions: got {completions.dtype} of shape {list(completions.shape)}; {_TAKES}")
    if not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer: got {type(tokenizer).__name__} with token ids; takes one with the method decode")
    flags = _flags(mask, [completions.shape[1]] * len(completions))
    flags = [row[: max((place + 1 for place, flag in enumerate(row) if flag), default=0)] for row in flags]
    ids = [row[: len(flag)] for row, flag in zip(completions.tolist(), flags, strict=True)]
    lowest = min((token for row in ids for token in row), default=0)
    if lowest < 0:
        raise ValueError(f"completions: got the token id {lowest}; takes ids of at least 0, or a mask without padding")
    decode = decoder(tokenizer)
    return [token_texts(decode, row) for row in ids], flags


def _flags(mask: Tensor | None, widths: list[int]) -> list[list[bool]]:
    """The mask as lists; True everywhere without one."""
    if mask is None:
        return [[True] * width for width in widths]
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: got {type(mask).__name__}; takes a tensor or None")
    require_plain(mask=mask)
    if mask.dim() != 2 or len(mask) != len(widths) or mask.shape[1] < max(widths, default=0):
        raise ValueError(f"mask: got shape {list(mask.shape)}; takes [{len(widths)}, {max(widths, default=0)}]")
    flags: list[list[bool]] = (mask != 0).tolist()
    for place, (row, width) in enumerate(zip(flags, widths, strict=True)):
        if any(row[width:]):
            raise ValueError(f"mask: got row {place} with a token after the {width} of its completion; takes 0 there")
    return flags
