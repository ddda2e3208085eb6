"""Sees that the selection acted in each training step, and says what kept it from acting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .names import place
from .table import UnknownTRL

# The methods by which a step reaches the selection, in the order of their calls.
_TO_ROLLOUTS = ("_prepare_inputs", "_generate_and_score_completions")
_TO_TOKENS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
_KNOWN = ("trl.", "transformers.", "d3s_kernels.")


class Watch:
    """Notices a choice of rollouts, and the gradient of the log-probabilities that the selection of tokens hooks."""

    def __init__(self) -> None:
        self._rollouts = self._asked = self._acted = False

    def rollouts_are_chosen(self) -> None:
        """Call it for each generation batch; several steps may train on one."""
        self._rollouts = True

    def begin(self) -> None:
        """Call it before a step."""
        self._asked = self._acted = False

    def seen(self, hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The same backward hook, which is noticed when it runs."""
        self._asked = True

        def noticed(gradient: Tensor) -> Tensor:
            self._acted = True
            return hook(gradient)

        return noticed

    def end(self, trainer: Any) -> None:
        """Call it after a step's backward.

        Raises:
            UnknownTRL: no rollouts were chosen, or no gradient came through the selection of tokens.
        """
        if not self._rollouts:
            raise UnknownTRL(
                "training_step: no rollouts were chosen for this step. Its batch has to come from "
                f"D3STrainer._generate_and_score_completions. {_overriding(trainer, _TO_ROLLOUTS)}"
            )
        if not self._acted:
            what = "asked for them, but has no gradient through them" if self._asked else "asked for none"
            raise UnknownTRL(
                "training_step: no token was selected in this step. The loss has to use the log-probabilities of "
                f"D3STrainer._compute_loss; it {what}. {_overriding(trainer, _TO_TOKENS)}"
            )


def _overriding(trainer: Any, names: Sequence[str]) -> str:
    """The methods of a trainer that are neither ours nor TRL's; if there are none, the first, to begin with."""
    methods = {name: getattr(trainer, name) for name in names}
    others = [name for name, method in methods.items() if not f"{method.__module__}.".startswith(_KNOWN)]
    return "; ".join(f"{name} is {place(methods[name])}" for name in others or names[:1])
