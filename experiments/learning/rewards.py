"""The reward: 1 for a completion that ends in the right answer, else 0."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def ends_in(completion: str, answer: str) -> bool:
    """Whether the completion ends in the answer. A number must be its last number; any other answer must be its end,
    ignoring case and full stops.
    """
    right = number(answer.strip())
    if right is None:
        return completion.strip().rstrip(".").casefold().endswith(answer.strip().rstrip(".").casefold())
    found = NUMBER.findall(completion)
    return bool(found) and number(found[-1]) == right


def number(text: str) -> float | None:
    return float(text.replace(",", "")) if NUMBER.fullmatch(text) else None
