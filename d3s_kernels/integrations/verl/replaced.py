"""The record of one replacement in verl. Each module of this folder lists its replacements in ``REPLACED``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """A function, method or class of verl, and its replacement."""

    owner: Any
    name: str
    takes: list[str]  # the original's parameters in verl 0.9.1
    by: Callable[..., Any]  # our class; or our function, whose first argument is the original
    held_by: tuple[str, ...] = ()  # modules that import the original by name
    passes_the_rest_on: bool = False  # whether our function passes further parameters on to the original
