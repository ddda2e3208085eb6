"""The options of the hooks: what a trainer calls, or starts with, has them under the same names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..rollouts import RolloutRule
from ..tokens import TokenRule, select_tokens
from ._options import check_options, check_token_rule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True)
class HookOptions:
    """Which rollouts and tokens are kept; ``docs/trainers.md`` says what each option means."""

    rollouts: float = 0.5
    rollout_rule: RolloutRule = "max_variance"
    rollout_scope: Literal["batch", "group"] = "batch"
    token_rule: TokenRule = "advantage_entropy"
    token_scope: Literal["batch", "sequence"] = "batch"
    token_pool: Literal["data_parallel", "micro_batch"] = "data_parallel"
    drop_zeros: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any], prefix: str) -> Self:
        """The options with these values, and the defaults for those that are missing.

        Raises:
            ValueError: a bad value, an unknown option; the message names it, with ``prefix`` before it.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                takes = ", ".join(f"{prefix}{option}" for option in known)
                raise ValueError(f"{prefix}{name}: got {value!r}, but it is no option; the options are {takes}")
        check_options(values, prefix)
        options = cls(**values)
        check_token_rule(options, prefix)
        return options

    def chosen_tokens(
        self,
        entropy: Tensor,
        advantages: Tensor,
        ratio: float,
        mask: Tensor,
        *,
        offsets: Tensor | None = None,
        data_parallel: ProcessGroup | None = None,
    ) -> Tensor:
        """The mask of :func:`d3s_kernels.select_tokens`, over the ranks of ``data_parallel`` if the options say so."""
        return select_tokens(
            entropy.detach(),
            advantages,
            ratio,
            rule=self.token_rule,
            mask=mask.bool(),
            offsets=offsets,
            scope=self.token_scope,
            drop_zeros=self.drop_zeros,
            process_group=data_parallel if self.token_pool == "data_parallel" else None,
        ).mask


@dataclasses.dataclass(frozen=True)
class CommandOptions(HookOptions):
    """The options of a trainer that is started through our module: ``--d3s.rollouts 0.5`` among its arguments."""

    token_ratio: float = 0.2

    @classmethod
    def from_command(cls, arguments: Sequence[str]) -> tuple[Self, list[str]]:
        """The options, and the arguments without them.

        Raises:
            ValueError: as in :meth:`from_values`; an option without a value.
        """
        values: dict[str, Any] = {}
        rest, words = [], iter(arguments)
        for word in words:
            if not word.startswith(PREFIX):
                rest.append(word)
                continue
            name, equals, value = word.removeprefix(PREFIX).partition("=")
            given = value if equals else next(words, None)
            if given is None:
                raise ValueError(f"{word}: got no value; takes one behind it")
            values[name] = _read(given)
        return cls.from_values(values, PREFIX), rest

    def as_command(self) -> list[str]:
        """The arguments that :meth:`from_command` reads these options from."""
        return [f"{PREFIX}{name}={json.dumps(value)}" for name, value in dataclasses.asdict(self).items()]


PREFIX = "--d3s."


def _read(word: str) -> Any:
    """A number, true or false; otherwise the word itself."""
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word
