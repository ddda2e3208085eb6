"""Sees that the selection acted in each training step, and says what kept it from acting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .surface import UnknownTRL
from .surface_check import place

# The methods through which a gradient reaches the selection, in the order of their calls.
_WAY = ("training_step", "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")
_OURS = ("trl.", "transformers.", __name__.rpartition(".")[0])


class Watch:
    """Notices the gradient of the log-probabilities that a selection hooks."""

    def __init__(self) -> None:
        self._asked = self._acted = False

    def begin(self) -> None:
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
            UnknownTRL: no gradient came through the selection, so that all tokens were trained on, or none.
        """
        if self._acted:
            return
        what = "asked for them, but has no gradient through them" if self._asked else "asked for none"
        names = [name for name in _WAY if _is_of_others(getattr(trainer, name))] or ["compute_loss"]
        raise UnknownTRL(
            "training_step: no token was selected in this step. The loss has to use the log-probabilities of "
            f"D3STrainer._compute_loss; it {what}. "
            + "; ".join(f"{name} is {place(getattr(trainer, name))}" for name in names)
        )


def _is_of_others(method: Any) -> bool:
    return not f"{getattr(method, '__module__', None)}.".startswith(_OURS)
