"""What TRL makes of a generation batch: its passes without gradient, before rewards are known, and its fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import FIELDS, Batch
from .table import UnknownTRL

OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"  # the batch fields that they fill


class Passes:
    """Which passes TRL should make, and which of them wait until the rollouts are chosen."""

    def __init__(self, names: list[str]) -> None:
        self.names = names  # those that TRL has not asked for yet, by the batch fields that they fill
        self.postponed: dict[str, Tensor] = {}  # what TRL got in their place
        self.entropy: Tensor | None = None

    def next(self, of_reference: bool) -> str:
        """The name of the pass that TRL asks for now, and is expected no more."""
        name = REFERENCE if of_reference and REFERENCE in self.names else self.names[0]
        self.names.remove(name)
        return name

    def postpone(self, name: str, rows: int, columns: int) -> Tensor:
        """A tensor for TRL to put into the batch, which raises as soon as anything reads it."""
        self.postponed[name] = torch.empty(rows, columns, device="meta").as_subclass(_Postponed)
        return self.postponed[name]

    def without_postponed(self, batch: Batch) -> Batch:
        """TRL's batch without the fields whose passes still have to be made.

        Raises:
            UnknownTRL: a pass did not come, or TRL put its result into another field; or the batch has a field of which
                it is not known on which side it is padded, and so how rows move.
        """
        if self.names:
            raise UnknownTRL(
                f"_generate_and_score_completions: no pass came for {' and '.join(self.names)}, which the loss needs; "
                "TRL makes its passes under other conditions than those in D3STrainer._pass_names"
            )
        for name, placeholder in self.postponed.items():
            if batch.get(name) is not placeholder:
                raise UnknownTRL(
                    f"{name}: the batch of _generate_and_score_completions does not have there what the pass for it "
                    "returned"
                )
        if unknown := sorted(batch.keys() - FIELDS):
            raise UnknownTRL(
                f"_generate_and_score_completions: its batch has {', '.join(unknown)}, which is not known; rows of it "
                "cannot be chosen, since nothing says on which side it is padded"
            )
        return {name: value for name, value in batch.items() if name not in self.postponed}


class _Postponed(Tensor):
    """Log-probabilities that are not there yet."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        raise UnknownTRL(
            f"_generate_and_score_completions: {name} reads log-probabilities before the rollouts are chosen; these "
            "are scored afterwards, since neither rewards nor advantages need them in the versions that were tested"
        )
