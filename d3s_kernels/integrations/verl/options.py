"""The options of D3S and ESPO in verl, with their defaults and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ...schedule import Budget
from .._options import check_options, check_token_rule, schedule_of
from ..selection_options import SelectionOptions

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


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

    sampling_mask_field: str | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, Any], section: str) -> D3SOptions:
        """The options from a section of a configuration; missing ones have their defaults."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"{section}.{key}: is no option; takes {', '.join(known)}")
        check_options(values, f"{section}.")
        options = cls(**values)
        check_token_rule(options, f"{section}.")
        return options

    def budget(self, progress: float, group_size: int) -> Budget:
        """The budget of a step. Its rollouts are between 2 and ``group_size``: a single rollout has no advantage."""
        return schedule_of(self, group_size)(progress)


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

    quantiles: list[float] = dataclasses.field(default_factory=lambda: [0.8])
    alpha: float = 0.02
    denominator: Literal["self", "old"] = "self"
    vocab_size: int | None = None
    entropy_source: Literal["old", "update", "surprisal"] = "old"

    @classmethod
    def from_config(cls, policy_loss: Mapping[str, Any]) -> EspoOptions:
        """The options of ``espo`` from verl's section ``policy_loss``; missing ones have their defaults."""
        defaults = dataclasses.asdict(cls())
        values = {key: policy_loss.get(key, default) for key, default in defaults.items()}
        check_options(values, f"{POLICY_LOSS}.")
        return cls(**values)
