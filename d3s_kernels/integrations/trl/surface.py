"""Checks TRL's behaviour during a run, where a change could otherwise give a wrong gradient without an error.

The trainer overrides private methods of TRL, which may change without notice. This package's ``__init__`` checks TRL's
version once; ``tests/trainers/trl_surface.py`` lists what we rely on. What the version does not tell is checked here:
which passes TRL makes over a generation batch, and that the selection acts in each step, also in a subclass of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import FIELDS, Batch

OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"  # the batch fields that passes without gradient fill
# The methods by which a step reaches the selection, in the order of their calls.
_TO_ROLLOUTS = ("_prepare_inputs", "_generate_and_score_completions")
_TO_TOKENS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
_KNOWN = ("trl.", "transformers.", "d3s_kernels.")


class UnknownTRL(RuntimeError):
    """TRL, or a class that overrides its methods, does something that the selection does not cover."""


class Passes:
    """Which passes TRL should make, and which of them wait until the rollouts are chosen."""

    def __init__(self, names: list[str]) -> None:
        self.names = names  # those that TRL has not asked for yet, by the batch fields that they fill
        self.postponed: dict[str, Tensor] = {}  # what TRL got in their place
        self.entropy: Tensor | None = None

    def next(self, of_reference: bool) -> str:
        """Returns the name of the pass that TRL asks for now, and removes it from ``names``."""
        name = REFERENCE if of_reference and REFERENCE in self.names else self.names[0]
        self.names.remove(name)
        return name

    def postpone(self, name: str, rows: int, columns: int) -> Tensor:
        """A placeholder for TRL's batch, which raises as soon as anything reads it. A plain tensor on the meta device
        would not: torch can add it to another tensor in place without an error.
        """
        self.postponed[name] = torch.empty(rows, columns, device="meta").as_subclass(_Postponed)
        return self.postponed[name]

    def without_postponed(self, batch: Batch) -> Batch:
        """TRL's batch without the fields whose passes still have to be made.

        Raises:
            UnknownTRL: TRL skipped a pass, or put its result into another field; or the batch has an unknown field,
                whose rows cannot be chosen because its padding side is unknown.
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


class Watch:
    """Checks that rollouts were chosen, and that a gradient reached the hook of the token selection."""

    def __init__(self) -> None:
        self.rollouts_were_chosen = False  # for a generation batch, on which several steps may train
        self._acted = False

    def begin(self) -> None:
        """Call it before a step."""
        self._acted = False

    def seen(self, hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wraps a backward hook, to record that it ran."""

        def noticed(gradient: Tensor) -> Tensor:
            self._acted = True
            return hook(gradient)

        return noticed

    def end(self, trainer: Any) -> None:
        """Call it after a step's backward.

        Raises:
            UnknownTRL: no rollouts were chosen, or no gradient came through the selection of tokens.
        """
        if not self.rollouts_were_chosen:
            raise UnknownTRL(
                "training_step: no rollouts were chosen for this step. Its batch has to come from "
                f"D3STrainer._generate_and_score_completions{_overriding(trainer, _TO_ROLLOUTS)}"
            )
        if not self._acted:
            raise UnknownTRL(
                "training_step: no token was selected in this step. The loss needs a gradient through the "
                f"log-probabilities of D3STrainer._compute_loss{_overriding(trainer, _TO_TOKENS)}"
            )


def _overriding(trainer: Any, names: Sequence[str]) -> str:
    """The methods of a trainer that are neither ours nor TRL's."""
    methods = [getattr(trainer, name) for name in names]
    others = [each for each in methods if not f"{each.__module__}.".startswith(_KNOWN)]
    named = [f"{each.__module__}.{getattr(each, '__qualname__', each)}" for each in others]
    return f"; it may not come through {' and '.join(named)}" if named else ""
