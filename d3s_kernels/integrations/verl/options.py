"""The options of D3S and ESPO in verl. These options can be created and checked without verl."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...selection.options import (
    ALPHA,
    FLAG,
    QUANTILES,
    RATIO,
    SelectionOptions,
    Takes,
    TokenScope,
    one_of,
    option,
    whole,
)
from ...tokens.select_tokens import TokenRule

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
Mode = Literal["d3s_sync", "d3s_colocate_async", "d3s_separate_async"]
"""The names of our trainer modes."""

_FIELD = Takes(
    lambda value: value is None or (isinstance(value, str) and value != ""),
    "the name of the rows' field that has the supports, or null",
)
_VOCABULARY = Takes(lambda value: value is None or whole(2).fits(value), whole(2).words)
_BASE = Takes(lambda value: isinstance(value, str) and value != "d3s", "the name of another policy loss")


@dataclass
class D3SOptions(SelectionOptions):
    """The options of our trainer modes: the options of a selection, and ``sampling_mask_field``."""

    sampling_mask_field: str | None = option(None, "the rows' field that has the supports of sampled tokens", _FIELD)


@dataclass
class PolicyLossOptions:
    """The options of the policy losses ``d3s`` and ``espo``. ``docs/verl.md`` says what each option means.

    ``d3s`` chooses among the tokens of one micro-batch of verl. A policy loss does not know the step, so the share of
    tokens is the same in every step.
    """

    base_loss: str = option("vanilla", "the policy loss of all tokens that d3s wraps", _BASE)
    token_ratio: float = option(0.20, "the share of a micro-batch's tokens that gets a gradient", RATIO)
    token_rule: TokenRule = option(
        "advantage_entropy",
        "by what tokens are ranked",
        one_of(*(rule for rule in get_args(TokenRule) if not rule.startswith("prefix"))),
    )
    token_scope: TokenScope = option("batch", "of the micro-batch, or of each sequence", one_of(*get_args(TokenScope)))
    drop_zeros: bool = option(False, "leave tokens of score 0 out", FLAG)

    quantiles: list[float] = option([0.8], "where espo cuts a sequence's tokens into groups", QUANTILES)
    alpha: float = option(0.02, "the clip range of a group of the largest entropy there can be", ALPHA)
    denominator: Literal["self", "old"] = option("self", "what a token's ratio is", one_of("self", "old"))
    vocab_size: int | None = option(None, "the model's by default", _VOCABULARY)
    entropy_source: Literal["old", "update", "surprisal"] = option(
        "old", "whose entropy makes the groups", one_of("old", "update", "surprisal")
    )
