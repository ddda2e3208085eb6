"""The options of D3S and ESPO in verl, with their defaults and checks."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from ...schedule import Budget
from ...selection import Selection
from ...selection_options import SelectionOptions, Takes, one_of, option, option_names, options_from, whole
from .._espo import ALPHA, QUANTILES

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
Options = TypeVar("Options")

_FIELD = Takes(
    lambda value: value is None or (isinstance(value, str) and value != ""),
    "the name of the rows' field that has the sets, or null",
)
_VOCABULARY = Takes(lambda value: value is None or whole(2).fits(value), whole(2).words)


def of_policy_loss(kind: type[Options], policy_loss: Mapping[str, Any]) -> Options:
    """The options of this kind from verl's section ``policy_loss``, which has others too; missing ones have their
    defaults.
    """
    missing = object()
    given = {name: policy_loss.get(name, missing) for name in option_names(kind)}
    values = {name: value for name, value in given.items() if value is not missing}
    return options_from(kind, values, f"{POLICY_LOSS}.")


@dataclasses.dataclass
class D3SOptions(SelectionOptions):
    """The options of ``trainer.v1.d3s_sync``. ``docs/verl.md`` says what each means.

    Raises:
        ValueError: from :meth:`from_config`, for a bad value or an unknown key; the message names the key, the value
            and the accepted values.

    Example:
        >>> from d3s_kernels.integrations.verl import D3SOptions
        >>> options = D3SOptions.from_config({"rollouts_end": 12}, section="trainer.v1.d3s_sync")
        >>> options.budget(progress=0.0, group_size=16), options.budget(progress=1.0, group_size=16)
        (Budget(rollouts=4, token_ratio=0.05), Budget(rollouts=12, token_ratio=0.2))
    """

    sampling_mask_field: str | None = option(None, "the rows' field that has the sets of sampled tokens", _FIELD)

    @classmethod
    def from_config(cls, values: Mapping[str, Any], section: str) -> D3SOptions:
        """The options from a section of a configuration; missing ones have their defaults."""
        return options_from(cls, values, f"{section}.")

    def budget(self, progress: float, group_size: int) -> Budget:
        """The budget of a step. Its rollouts are between 2 and ``group_size``: a single rollout has no advantage."""
        return Selection(self).budget(progress, group_size)


@dataclasses.dataclass
class EspoOptions:
    """The options of the policy loss ``espo``. ``docs/verl.md`` says what each means.

    Raises:
        ValueError: from :meth:`from_config`, as :meth:`D3SOptions.from_config`.

    Example:
        >>> from d3s_kernels.integrations.verl.options import EspoOptions
        >>> EspoOptions.from_config({"loss_mode": "espo", "alpha": 0.05})
        EspoOptions(quantiles=[0.8], alpha=0.05, denominator='self', vocab_size=None, entropy_source='old')
    """

    quantiles: list[float] = option([0.8], "where a sequence's tokens are cut into groups", QUANTILES)
    alpha: float = option(0.02, "the clip range of a group of the largest entropy there can be", ALPHA)
    denominator: Literal["self", "old"] = option("self", "what a token's ratio is", one_of("self", "old"))
    vocab_size: int | None = option(None, "the model's by default", _VOCABULARY)
    entropy_source: Literal["old", "update", "surprisal"] = option(
        "old", "whose entropy makes the groups", one_of("old", "update", "surprisal")
    )

    @classmethod
    def from_config(cls, policy_loss: Mapping[str, Any]) -> EspoOptions:
        """The options of ``espo`` from verl's section ``policy_loss``; missing ones have their defaults."""
        return of_policy_loss(EspoOptions, policy_loss)
