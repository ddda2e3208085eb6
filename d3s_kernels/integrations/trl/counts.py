"""Counts the tokens of a micro-batch and of a run, and warns of an update without a policy gradient."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ...selection.metrics import LARGEST, OFF_POLICY_SHARE, token_metrics, token_sums, token_weights


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

    def _sum_tokens(
        self, kept: Tensor, mask: Tensor, entropy: Tensor, advantages: Tensor, left: Tensor, weighted: Tensor,
        measured: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns sums over a micro-batch of all processes, float64 ``[9]``. The first six sums are from
        :func:`d3s_kernels.selection.metrics.token_sums`. The others are numbers of tokens: the tokens that were left to
        choose from; the tokens whose loss has a weight above 0; the kept tokens whose loss has a weight above 0.
        """
        sums = token_sums(kept, mask, entropy, advantages, measured)
        more = torch.stack([part.sum() for part in (left, weighted, kept & weighted)])
        totals: Tensor = self.accelerator.reduce(torch.cat([sums, more]), reduction="sum")
        return totals

    @staticmethod
    def _metrics_of(
        totals: Tensor, threshold: Tensor, asked: float, may_be_off_policy: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the metrics that follow from :meth:`_sum_tokens`, and a weight for each metric that is a mean: the
        number of its tokens.
        """
        metrics, weights = token_metrics(totals[:6], threshold, asked), token_weights(totals[:6], threshold)
        if may_be_off_policy:
            metrics[OFF_POLICY_SHARE], weights[OFF_POLICY_SHARE] = 1 - totals[7] / totals[1], totals[1]
        return metrics, weights

    def _count_tokens(self, numbers: list[int]) -> None:
        """Counts a micro-batch's tokens, over all processes, and logs what was counted.

        Args:
            numbers: the numbers of kept tokens, of all tokens, of tokens whose loss has a weight above 0, and of kept
                tokens whose loss has a weight above 0.
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
                "or have the weight 0, so that it has no policy gradient. Wider bounds leave more: "
                f"{self._wider_bounds}",
                stacklevel=2,
            )


def means(metrics: dict[str, list[Any]], weights: dict[str, list[Any]]) -> dict[str, float]:
    """Returns each metric's mean over micro-batches; the mean is weighted if the metric has ``weights``. For
    ``LARGEST``, returns the maximum instead. There is one host sync for all metrics. A metric without a known value is
    left out.
    """
    names = list(metrics)
    lists = _on_host([*metrics.values(), *(weights.get(name, []) for name in names)])
    found = {}
    for name, values, own in zip(names, lists, lists[len(names) :], strict=False):
        # The values are in TRL's list, which other code may have changed. If the list has another length than the
        # weights, the weights are not used. They are not used either if all are 0: TRL's own metrics are 0 then.
        pairs = zip(values, own if len(own) == len(values) and any(own) else [1] * len(values), strict=True)
        # NaN is a mean over nothing. TRL's "entropy" is NaN if no token's entropy is known.
        if known := [(value, weight) for value, weight in pairs if not math.isnan(value)]:
            total = sum(weight for _, weight in known) or 1
            mean = sum(value * weight for value, weight in known) / total
            found[name] = max(values) if name == LARGEST else mean
    return found


def _on_host(lists: list[list[Any]]) -> list[list[float]]:
    """Returns the lists with their 0-d tensors replaced by numbers. There is one host sync for all lists."""
    waiting = [value.double() for values in lists for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(waiting).tolist())
    return [[next(numbers) if isinstance(value, Tensor) else value for value in values] for values in lists]
