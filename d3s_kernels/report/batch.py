"""Checks the arguments of a page and converts them to plain Python values for each rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._arguments.checks import as_bool, no_tensor, require_plain
from .text import decoder, token_texts

_TAKES = "takes integers [rollouts, tokens] with a tokenizer, or for each rollout a list of token texts"

Dtype = Literal["bool", "float"]


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def brief(value: Any) -> str:
    """Returns the type of a wrong argument and the start of its text."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def completion_texts(
    completions: Tensor | Sequence[Sequence[str]], mask: Tensor | None, tokenizer: Any
) -> tuple[list[list[str]], list[list[bool]]]:
    """Returns, for each completion, the text of each token, and whether each token is in the mask."""
    if not isinstance(completions, Tensor):
        if not is_list(completions) or not all(is_list(row) for row in completions):
            raise TypeError(f"completions: got {brief(completions)}; {_TAKES}")
        texts = [list(row) for row in completions]
        for text in (text for row in texts for text in row):
            if not isinstance(text, str):
                raise TypeError(f"completions: got a list with {brief(text)}; {_TAKES}")
        return texts, _counts(mask, [len(row) for row in texts])
    require_plain(completions=completions)
    whole = not (completions.is_floating_point() or completions.is_complex() or completions.dtype == torch.bool)
    if completions.dim() != 2 or not whole:
        raise TypeError(f"completions: got {completions.dtype} of shape {list(completions.shape)}; {_TAKES}")
    if not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer: got {type(tokenizer).__name__} with token ids; takes one with the method decode")
    counts = _counts(mask, [completions.shape[1]] * len(completions))
    for row in counts:
        while row and not row[-1]:  # padding
            row.pop()
    ids = [row[: len(flags)] for row, flags in zip(completions.tolist(), counts, strict=True)]
    lowest = min((token for row in ids for token in row), default=0)
    if lowest < 0:
        raise ValueError(f"completions: got the token id {lowest}; takes ids of at least 0, or a mask without padding")
    decode = decoder(tokenizer)
    return [token_texts(decode, row) for row in ids], counts


def _counts(mask: Tensor | None, lengths: list[int]) -> list[list[bool]]:
    """Returns, for each completion, whether each token is in the mask; True everywhere if ``mask`` is None."""
    if mask is None:
        return [[True] * length for length in lengths]
    if not isinstance(mask, Tensor):
        raise no_tensor("mask", mask, "a tensor or None")
    require_plain(mask=mask)
    longest = max(lengths, default=0)
    if mask.dim() != 2 or len(mask) != len(lengths) or mask.shape[1] < longest:
        raise ValueError(f"mask: got shape {list(mask.shape)}; takes [{len(lengths)}, {longest}]")
    rows: list[list[bool]] = (mask != 0).tolist()
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if any(row[length:]):
            raise ValueError(f"mask: got row {number} with a token after the {length} of its completion; takes 0 there")
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def per_rollout(name: str, value: Tensor | None, count: int, dtype: Dtype) -> list[Any]:
    """Returns one value for each rollout. All values are None if the argument is None."""
    if value is None:
        return [None] * count
    value = _checked(name, value, dtype)
    if value.numel() != count:
        raise ValueError(f"{name}: got shape {list(value.shape)}; takes one value for each of {count} rollouts")
    return value.flatten().tolist()


def per_token(name: str, value: Tensor, lengths: list[int], kept: list[bool], dtype: Dtype) -> list[list[Any]]:
    """Returns, for each rollout, the values of its tokens. ``value`` has rows either for all rollouts, or only for the
    kept rollouts. In the second case, the list of a dropped rollout is empty.
    """
    value = _checked(name, value, dtype)
    longest, every, some = max(lengths, default=0), len(kept), sum(kept)
    if value.dim() != 2 or len(value) not in (every, some) or value.shape[1] < longest:
        number = str(every) if some == every else f"{every}, or {some} (kept rollouts only),"
        raise ValueError(f"{name}: got shape {list(value.shape)}; takes {number} rows of {longest} tokens")
    rows = iter(value.tolist())
    return [
        next(rows)[:length] if keep or len(value) == every else [] for length, keep in zip(lengths, kept, strict=True)
    ]


def _checked(name: str, value: Tensor, dtype: Dtype) -> Tensor:
    if not isinstance(value, Tensor):
        raise no_tensor(name, value, f"a {dtype} tensor")
    require_plain(**{name: value})
    if dtype == "bool":
        return as_bool(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name}: got {value.dtype}; takes a float tensor")
    return value
