"""The options of a selection, with the same names and defaults for every trainer, and the code that checks and reads
them.
"""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from ..off_policy.trusted_tokens import RULES, TrustRule, bounds_of
from ..rollouts.select_rollouts import RolloutRule, Scope
from ..tokens.select_tokens import TokenRule

TokenScope = Literal["batch", "sequence"]
Shape = Literal["linear", "cosine", "exponential"]
KeptOrAll = Literal["kept", "all"]
OffPolicyRule = Literal["none", TrustRule]
Options = TypeVar("Options")
PREFIX = "--d3s."


class Takes(NamedTuple):
    """Says which values an option accepts: a test for a value, and a description of the accepted values for error
    messages.
    """

    fits: Callable[[Any], bool]
    words: str


def one_of(*words: str) -> Takes:
    return Takes(lambda value: isinstance(value, str) and value in words, " or ".join(map(repr, words)))


def whole(at_least: int) -> Takes:
    return Takes(lambda value: type(value) is int and value >= at_least, f"a whole number of at least {at_least}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_quantiles(value: Any) -> bool:
    if not isinstance(value, Sequence) or not all(_is_number(cut) and 0 < cut < 1 for cut in value):
        return False
    return list(value) == sorted(set(value)) and len(value) <= 15


ROLLOUTS = Takes(
    lambda value: _is_number(value) and (0 < value <= 1 or (1 < value < math.inf and value == int(value))),
    "a share in (0, 1] of a group's rollouts, or their number, which is whole and above 1",
)
RATIO = Takes(lambda value: _is_number(value) and 0 < value <= 1, "a number in (0, 1]")
SHARE = Takes(lambda value: value is None or RATIO.fits(value), "a number in (0, 1], or None")
QUANTILES = Takes(_are_quantiles, "rising numbers in (0, 1), at most 15")
ALPHA = Takes(lambda value: _is_number(value) and 0 < value < math.inf, "a number above 0")
BOUND = Takes(lambda value: value is None or (_is_number(value) and value >= 0), "a number of at least 0, or None")
FLAG = Takes(lambda value: isinstance(value, bool), "true or false")


class Help(str):
    """An option's help text; its attribute ``takes`` describes the values that the option accepts. ``takes`` cannot be
    a metadata entry, since transformers passes all metadata to ``argparse``, which refuses unknown names.
    """

    takes: Takes


def option(default: Any, help: str, takes: Takes) -> Any:
    """Returns a dataclass field for an option, with the option's help text and accepted values."""
    text = Help(help)
    text.takes = takes
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def _accepted(kind: Any) -> Iterator[tuple[str, Takes]]:
    """Yields the name and the accepted values of each option of a dataclass or its instance; other fields are skipped.
    A subclass may declare an option again just to change its default. The option's help text is then only in a base
    class.
    """
    bases = (kind if isinstance(kind, type) else type(kind)).__mro__
    for each in dataclasses.fields(kind):
        declared = (vars(base).get("__dataclass_fields__", {}).get(each.name, each) for base in bases)
        texts = (text for field in declared if isinstance(text := field.metadata.get("help"), Help))
        if (text := next(texts, None)) is not None:
            yield each.name, text.takes


def option_names(kind: Any) -> list[str]:
    return [name for name, _ in _accepted(kind)]


def check_options(options: Any, section: str = "") -> None:
    """Raises a ValueError for the first option with a bad value. The message names the option, with ``section`` before
    its name.
    """
    for name, takes in _accepted(options):
        if not takes.fits(value := getattr(options, name)):
            raise ValueError(f"{section}{name}: got {value!r}; takes {takes.words}")
    if isinstance(options, SelectionOptions):
        rule, bounds = options.off_policy_rule, (options.off_policy_low, options.off_policy_high)
        names = f"{section}off_policy_low", f"{section}off_policy_high"
        if rule != "none":
            bounds_of(rule, *bounds, names)
        for name, bound in zip(names, bounds, strict=True):
            if rule == "none" and bound is not None:
                raise ValueError(
                    f"{name}: got {bound} with {section}off_policy_rule 'none'; takes None, or set "
                    f"{section}off_policy_rule to {' or '.join(map(repr, RULES))}"
                )


# For each rule, the options that must have one fixed value. For example, the scores of "random" are random numbers
# above 0, so "drop_zeros" must be False.
_TAKEN: dict[str, dict[str, Any]] = {
    "entropy_quantile": {"token_scope": "batch", "drop_zeros": False}, "random": {"drop_zeros": False},
    "prefix": {"token_scope": "batch", "loss_denominator": "all"},
    "prefix_advantage_entropy": {"loss_denominator": "all"},
}  # fmt: skip


def check_token_rule(options: Any, section: str = "") -> None:
    """Raises a ValueError for options that the rule for tokens does not support."""
    for name, takes in _TAKEN.get(options.token_rule, {}).items():
        if (value := getattr(options, name)) != takes:
            raise ValueError(f"{section}{name}: got {value!r} with token_rule {options.token_rule!r}; takes {takes!r}")
    for name in ("token_ratio_start", "token_ratio_end"):
        if options.token_rule == "prefix" and (value := getattr(options, name)) < 0.5:
            raise ValueError(f"{section}{name}: got {value!r} with token_rule 'prefix'; takes a number in [0.5, 1]")


def require_mode(options: Any, mode: str, names: Sequence[str], section: str = "") -> None:
    """Raises a ValueError if one of these options, which only ``mode`` reads, does not have its default."""
    for each in dataclasses.fields(options):
        if each.name not in names:
            continue
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if (value := getattr(options, each.name)) != default:
            raise ValueError(
                f"{section}{each.name}: got {value!r} without {mode}, which alone reads it; takes {default!r}"
            )


def options_from(kind: type[Options], values: Mapping[str, Any], section: str = "") -> Options:
    """Returns options of class ``kind`` with these values, and with defaults for all other options.

    Raises:
        ValueError: a bad value, or an unknown option. The message names the option, with ``section`` before its name.
    """
    known = option_names(kind)
    for name, value in values.items():
        if name not in known:
            takes = ", ".join(section + each for each in known)
            raise ValueError(f"{section}{name}: got {value!r}, but it is no option; the options are {takes}")
    options = kind(**values)
    check_options(options, section)
    if "token_rule" in known:
        check_token_rule(options, section)
    return options


def values_of_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Splits a command line into the values of its ``--d3s.`` options and the remaining words.

    The value of an option is the next word, or the text after ``=``. If the value is JSON (such as a number, true or
    false), it is parsed; else it stays text.

    Raises:
        ValueError: an option without a value.
    """
    values: dict[str, Any] = {}
    rest, left = [], iter(words)
    for word in left:
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        name, equals, after = word.removeprefix(PREFIX).partition("=")
        text = after if equals else next(left, None)
        if text is None:
            raise ValueError(f"{word}: got no value; takes one behind it")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values, rest


_DEFAULTS = {
    "rollouts_start": 0.25, "rollouts_end": 1.0, "token_rule": "advantage_entropy",
    "token_ratio_start": 0.05, "token_ratio_end": 0.20, "loss_denominator": "kept",
}  # fmt: skip
_DEFAULTS_OF_RULES: dict[Any, dict[str, Any]] = {
    "prefix": {"token_ratio_start": 0.5, "token_ratio_end": 0.5, "loss_denominator": "all"},
    "prefix_advantage_entropy": {"loss_denominator": "all"},
}


@dataclass
class SelectionOptions:
    """The options that determine which rollouts and tokens are kept. A trainer's options inherit from this class, so
    that names and defaults are the same everywhere.

    ``docs/selection.md`` lists the options in a table; each field's ``metadata["help"]`` explains the option. If an
    option's default depends on other options, the field has the default None, and ``__post_init__`` sets the value. So
    a trainer can distinguish a value that the user gave from a default.
    """

    rollouts_start: float = option(
        None,
        "Rollouts of each group that are trained on at the start: at most 1 is a share of the group, rounded half up; "
        "above 1 it is their number. Clamped to [2, the group's]. TRL rounds all of them up to a multiple of processes "
        "x steps per generation, so that a small per_device_train_batch_size leaves little to drop. Default: 0.25.",
        ROLLOUTS,
    )
    rollouts_end: float = option(
        None,
        "Rollouts of each group that are trained on at the end: a share or a number, likewise. Default: 1.0.",
        ROLLOUTS,
    )
    token_ratio_start: float = option(
        None,
        "Share of the kept rollouts' tokens that gets a gradient at the start. Default: 0.05; with token_rule "
        "'prefix', 0.5.",
        RATIO,
    )
    token_ratio_end: float = option(
        None,
        "Share of the kept rollouts' tokens that gets a gradient at the end. Default: 0.2; with token_rule 'prefix', "
        "0.5.",
        RATIO,
    )
    schedule_shape: Shape = option(
        "linear", "The way from start to end; 'linear' is the paper's.", one_of(*get_args(Shape))
    )
    rollout_rule: RolloutRule = option(
        "max_variance",
        "Which rollouts are kept, by their advantages: those that vary most (D3S, PODS), the 'highest', those with the "
        "'largest_abs' (CPPO), some of each 'percentile', or 'random' ones; see d3s_kernels.select_rollouts.",
        one_of(*get_args(RolloutRule)),
    )
    rollout_scope: Scope = option(
        "batch",
        "'batch' chooses from all groups together (D3S); 'group' keeps the same number of each group (D3S-I, and the "
        "subset that PODS picks).",
        one_of(*get_args(Scope)),
    )
    token_rule: TokenRule = option(
        None,
        "By what tokens are ranked: 'advantage_entropy' (the default), |advantage| x entropy (D3S), 'entropy' (80/20), "
        "|'advantage'|, or at 'random' (S-GRPO). 'entropy_quantile' keeps all at or above a quantile, as TRL's "
        "top_entropy_quantile on a single process. 'prefix' cuts each sequence at random and keeps what is before the "
        "cut (NAT); 'prefix_advantage_entropy' ranks what is before the cut. See d3s_kernels.select_tokens.",
        one_of(*get_args(TokenRule)),
    )
    token_scope: TokenScope = option(
        "batch",
        "'batch' ranks the tokens of all sequences of all processes together; 'sequence' keeps the share of each "
        "sequence.",
        one_of(*get_args(TokenScope)),
    )
    loss_denominator: KeptOrAll = option(
        None,
        "What gradients are averaged over: 'kept' tokens (the default), which makes them larger by about 1 / the share "
        "kept (gradient clipping sees that, AdamW does not: mind max_grad_norm), or 'all' valid ones (the default with "
        "prefixes, whose weights take the place of the factor).",
        one_of(*get_args(KeptOrAll)),
    )
    drop_zeros: bool = option(False, "Leave tokens of score 0 out as well, even if fewer than the share remain.", FLAG)
    advantages_from: KeptOrAll = option(
        "all",
        "'all': advantages are those of the whole group (D3S). 'kept': normalised anew over the kept rollouts of each "
        "group (PODS, with rollout_scope='group' and token ratios of 1).",
        one_of("all", "kept"),
    )
    off_policy_rule: OffPolicyRule = option(
        "none",
        "Which tokens are left out because the policy that is trained gives them another probability than the one that "
        "sampled them: see d3s_kernels.trusted_tokens. The share of tokens is of the others.",
        one_of("none", *RULES),
    )
    off_policy_low: float | None = option(None, "The rule's lower bound, for a ratio. None: its default.", BOUND)
    off_policy_high: float | None = option(None, "The rule's upper bound. None: its default.", BOUND)
    group_variance_mass: float | None = option(
        None,
        "Keep rollouts only of the fewest groups that have this share of the variance of all rewards (RAGEN-2), as "
        "many of each as before. 1 leaves out the groups whose rewards are all equal. None: all groups; see "
        "d3s_kernels.variance_mass.",
        SHARE,
    )
    drop_shared_tokens: bool = option(
        False,
        "Leave out the tokens of responses with a negative advantage that a right response of the same group begins or "
        "ends with too (GTPO): see d3s_kernels.shared_tokens. The share of tokens is of the others.",
        FLAG,
    )

    def __post_init__(self) -> None:
        rule = self.token_rule if isinstance(self.token_rule, str) else None
        for name, value in (_DEFAULTS | _DEFAULTS_OF_RULES.get(rule, {})).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        # A trainer's options inherit from this class and from the trainer's own options.
        if (of_trainer := getattr(super(), "__post_init__", None)) is not None:
            of_trainer()


def rollouts_of(given: float, group_size: int) -> int:
    """Converts an option's value to a number of rollouts of a group. A value up to 1 is a share of the group, rounded
    half up; a value above 1 is the number itself. The number is clamped to [2, group_size], since a single rollout has
    no advantage.

    Example:
        >>> from d3s_kernels.selection.options import rollouts_of
        >>> rollouts_of(0.25, 8), rollouts_of(0.25, 10), rollouts_of(12, 8), rollouts_of(1, 8)
        (2, 3, 8, 8)
    """
    # A share is taken as the decimal number that the user wrote: with binary floats, 0.29 * 50 is below 14.5.
    asked = given if given > 1 else (Decimal(repr(given)) * group_size).to_integral_value(ROUND_HALF_UP)
    return min(max(int(asked), 2), max(group_size, 2))
