"""One replacement in verl. Each module lists its own in ``REPLACED``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """A function, method or class of verl."""

    owner: Any
    name: str
    takes: list[str]  # its parameters in verl 0.9.1
    by: Callable[..., Any]  # our class; or our function, whose first argument is the original
    held_by: tuple[str, ...] = ()  # modules that import it by name
    passes_the_rest_on: bool = False  # whether ours passes further parameters on to the original
