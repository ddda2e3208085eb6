"""The values that each option of D3S accepts, in every trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..schedule import Budget, DownSamplingSchedule


def is_whole_number(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


def _are_quantiles(value: Any) -> bool:
    if not isinstance(value, Sequence) or not all(type(cut) in (int, float) and 0 < cut < 1 for cut in value):
        return False
    return list(value) == sorted(set(value)) and len(value) <= 15


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: isinstance(value, str) and value in words), " or ".join(map(repr, words))


_TAKES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rollouts_start": (is_whole_number, "a whole number of at least 1"),
    "rollouts_end": (is_whole_number, "a whole number of at least 1"),
    "token_ratio_start": (_is_ratio, "a number in (0, 1]"),
    "token_ratio_end": (_is_ratio, "a number in (0, 1]"),
    "token_ratio": (_is_ratio, "a number in (0, 1]"),
    "schedule_shape": _one_of("linear", "cosine", "exponential"),
    "rollout_scope": _one_of("batch", "group"),
    "token_scope": _one_of("batch", "sequence"),
    "entropy_from": _one_of("auto", "update", "rollout"),
    "loss_denominator": _one_of("kept", "all"),
    "advantages_from": _one_of("all", "kept"),
    "selection_page_steps": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    "drop_zeros": (lambda value: isinstance(value, bool), "true or false"),
    "base_loss": (lambda value: isinstance(value, str) and value != "d3s", "the name of another policy loss"),
    "quantiles": (_are_quantiles, "rising numbers in (0, 1), at most 15"),
    "alpha": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0"),
    "denominator": _one_of("self", "old"),
    "vocab_size": (
        lambda value: value is None or (is_whole_number(value) and value >= 2),
        "a whole number of at least 2",
    ),
    "importance_sampling_level": _one_of("token", "sequence", "entropy_group"),
    "entropy_source": _one_of("old", "update", "surprisal"),
}
_TAKES |= {f"espo_{name}": _TAKES[name] for name in ("quantiles", "alpha", "denominator")}  # TRL has no sections


def check_options(values: Mapping[str, Any], section: str = "") -> None:
    """Raises a ValueError for the first option with a bad value; the message names it, with ``section`` before it."""
    for key, value in values.items():
        fits, takes = _TAKES[key]
        if not fits(value):
            raise ValueError(f"{section}{key}: got {value!r}; takes {takes}")


def schedule_of(options: Any) -> DownSamplingSchedule:
    """The schedule that a trainer's options describe."""
    start = Budget(options.rollouts_start, options.token_ratio_start)
    end = Budget(options.rollouts_end, options.token_ratio_end)
    return DownSamplingSchedule(start, end, options.schedule_shape)
