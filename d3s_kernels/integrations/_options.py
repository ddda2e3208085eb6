"""Checks of options, for all trainers that are built on transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any


def check_one_process(options: Any, section: str = "") -> None:
    """Raises a ValueError for the rule "entropy_quantile" with several processes: each would use its own quantile."""
    if options.token_rule == "entropy_quantile" and options.world_size > 1:
        raise ValueError(
            f"{section}token_rule: got 'entropy_quantile' with {options.world_size} processes; takes 'entropy', which "
            "keeps an exact share of the tokens of all processes"
        )


def choose_by_entropy(options: Any, share: float) -> None:
    """Sets the options that ``top_entropy_quantile`` implies; raises a ValueError if one was set to another value."""
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
