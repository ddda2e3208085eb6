"""Counts the tokens that a run trains on, and warns of an update without a policy gradient."""

from __future__ import annotations

import warnings
from typing import Any

from ...metrics import OFF_POLICY_SHARE


class CountsTokens:
    """A mixin that counts kept tokens. In the list of base classes, the mixin must precede the trainer."""

    accelerator: Any
    state: Any
    _metrics: Any
    _counted_in_update: tuple[int, ...] = (0, 0, 0, 0)  # the numbers given to _count_tokens in this update so far
    _warned_of_weights = False
    _wider_bounds = "those of off_policy_rule"

    def train(self, *arguments: Any, **options: Any) -> Any:
        self._counted_in_update = (0, 0, 0, 0)  # a new run starts a new update
        return super().train(*arguments, **options)  # type: ignore[misc]  # of the trainer

    def _count_tokens(self, numbers: list[int]) -> None:
        """Counts a micro-batch's tokens, over all processes, and logs what was counted.

        Args:
            numbers: the numbers of kept tokens, of all tokens, of those whose loss has a weight above 0, and of the
                kept ones of these.
        """
        metrics = self._metrics["train"]
        # Checkpoints contain this part of the trainer's state. A new run starts at 0.
        counts = self.state.stateful_callbacks.setdefault("D3STrainer", {"num_tokens_kept": 0})
        counts["num_tokens_kept"] += numbers[0]
        metrics["d3s/num_tokens_kept"] = [counts["num_tokens_kept"]]  # one value, since TRL logs a list's mean
        self._counted_in_update = tuple(map(sum, zip(self._counted_in_update, numbers, strict=True)))
        if self.accelerator.sync_gradients:  # the update's last micro-batch
            metrics["d3s/updates_without_tokens"].append(float(self._counted_in_update[0] == 0))
            self._warn_of_weights(*self._counted_in_update)
            self._counted_in_update = (0, 0, 0, 0)

    def _warn_of_weights(self, kept: int, number: int, left: int, kept_left: int) -> None:
        """Warns once, on the main process, if off-policyness leaves an update without a policy gradient."""
        lost = number > 0 and (left == 0 or (kept > 0 and kept_left == 0))
        if lost and not self._warned_of_weights and self.accelerator.is_main_process:
            self._warned_of_weights = True
            warnings.warn(
                f"{OFF_POLICY_SHARE}: {number - left} of {number} tokens of an update are left out as off-policy "
                f"or have the weight 0, so that it has no policy gradient. Wider bounds leave more: "
                f"{self._wider_bounds}",
                stacklevel=2,
            )
