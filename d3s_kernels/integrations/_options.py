"""The values that each option of D3S accepts, in every trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, get_args

from ..rollouts import RolloutRule
from ..schedule import Budget, DownSamplingSchedule
from ..tokens import TokenRule


def is_whole_number(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_rollouts(value: Any) -> bool:
    return type(value) in (int, float) and (0 < value <= 1 or (1 < value < math.inf and value == int(value)))


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


def _are_quantiles(value: Any) -> bool:
    if not isinstance(value, Sequence) or not all(type(cut) in (int, float) and 0 < cut < 1 for cut in value):
        return False
    return list(value) == sorted(set(value)) and len(value) <= 15


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: isinstance(value, str) and value in words), " or ".join(map(repr, words))


_ROLLOUTS = (_is_rollouts, "a share in (0, 1] of a group's rollouts, or their number, which is whole and above 1")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TAKES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rollouts": _ROLLOUTS,
    "rollouts_start": _ROLLOUTS,
    "rollouts_end": _ROLLOUTS,
    "token_ratio_start": (_is_ratio, "a number in (0, 1]"),
    "token_ratio_end": (_is_ratio, "a number in (0, 1]"),
    "token_ratio": (_is_ratio, "a number in (0, 1]"),
    "schedule_shape": _one_of("linear", "cosine", "exponential"),
    "rollout_rule": _one_of(*get_args(RolloutRule)),
    "rollout_scope": _one_of("batch", "group"),
    "token_rule": _one_of(*get_args(TokenRule)),
    "token_scope": _one_of("batch", "sequence"),
    "token_pool": _one_of("data_parallel", "micro_batch"),
    "entropy_from": _one_of("auto", "update", "rollout"),
    "loss_denominator": _one_of("kept", "all"),
    "advantages_from": _one_of("all", "kept"),
    "selection_page_steps": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    "refill": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    "drop_zeros": _FLAG,
    "sampling_mask": _FLAG,
    "max_kept": (is_whole_number, "a whole number of at least 1"),
    "base_loss": (lambda value: isinstance(value, str) and value != "d3s", "the name of another policy loss"),
    "quantiles": (_are_quantiles, "rising numbers in (0, 1), at most 15"),
    "alpha": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0"),
    "denominator": _one_of("self", "old"),
    "sampling_mask_field": (
        lambda value: value is None or (isinstance(value, str) and value != ""),
        "the name of the rows' field that has the sets, or null",
    ),
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


def check_token_rule(options: Any, section: str = "") -> None:
    """Raises a ValueError for token options that rule "entropy_quantile" does not have."""
    if options.token_rule != "entropy_quantile":
        return
    for key, takes in (("token_scope", "batch"), ("drop_zeros", False), ("token_pool", "micro_batch")):
        given = getattr(options, key, takes)
        if given != takes:
            raise ValueError(f"{section}{key}: got {given!r} with token_rule 'entropy_quantile'; takes {takes!r}")


def check_one_process(options: Any, section: str = "") -> None:
    """Raises a ValueError for a rule that has its quantile of a single process only."""
    if options.token_rule == "entropy_quantile" and options.world_size > 1:
        raise ValueError(
            f"{section}token_rule: got 'entropy_quantile' with {options.world_size} processes; takes 'entropy', which "
            "keeps an exact share of the tokens of all processes"
        )


def choose_by_entropy(options: Any, share: float) -> None:
    """Sets the options that a trainer's ``top_entropy_quantile`` stands for, and refuses others beside it."""
    if not share > 0:
        raise ValueError(f"top_entropy_quantile: got {share}; takes a number above 0")
    implied = {
        "token_rule": "entropy", "token_ratio_start": share, "token_ratio_end": share, "token_scope": "batch",
        "drop_zeros": False, "loss_denominator": "all",
    }  # fmt: skip
    for name, value in implied.items():
        given = getattr(options, name)
        if given not in (getattr(type(options), name), value):
            raise ValueError(
                f"{name}: got {given!r} beside top_entropy_quantile {share}, which takes {value!r}; for another "
                "choice of tokens leave top_entropy_quantile at 1.0"
            )
        setattr(options, name, value)


def rollouts_of(given: float, group_size: int) -> int:
    """How many rollouts of a group an option asks for: at most 1 is a share, which is rounded half up; above 1 it is
    their number. Clamped to [2, group_size], since a single rollout has no advantage.

    Example:
        >>> from d3s_kernels.integrations._options import rollouts_of
        >>> rollouts_of(0.25, 8), rollouts_of(0.25, 10), rollouts_of(12, 8), rollouts_of(1, 8)
        (2, 3, 8, 8)
    """
    # The decimal number that was written: in binary 0.29 of 50 is less than 14.5.
    asked = given if given > 1 else (Decimal(repr(given)) * group_size).to_integral_value(ROUND_HALF_UP)
    return min(max(int(asked), 2), max(group_size, 2))


def schedule_of(options: Any, group_size: int) -> DownSamplingSchedule:
    """The schedule that a trainer's options describe, with both ends as numbers of rollouts."""
    start = Budget(rollouts_of(options.rollouts_start, group_size), options.token_ratio_start)
    end = Budget(rollouts_of(options.rollouts_end, group_size), options.token_ratio_end)
    return DownSamplingSchedule(start, end, options.schedule_shape)
