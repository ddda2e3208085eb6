"""What the choices of rollouts and of tokens both need of a run: its processes, its budget and its log."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from ...metrics import token_metrics, token_sums
from .._run import RunWithBudget
from .config import D3SConfig
from .head import HostNumber


class Run(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer with a budget that follows the run, and a log of our metrics that waits for no device."""

    args: D3SConfig
    _just_kept = HostNumber(torch.zeros(()))  # the kept tokens of the last micro-batch, of all processes
    _kept_in_update = 0  # those of the update that is being made

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def _log(self, metrics: dict[str, Tensor]) -> None:
        """Keeps 0-d tensors for the next log, which alone waits for the device. NaN stands for nothing to log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        metrics = self._metrics["train"]
        # The log of an evaluation leaves the metrics of training to the next one.
        ours = [name for name in metrics if name.startswith("d3s/")] if self.model.training else []
        if ours:
            waiting = [value.double() for name in ours for value in metrics[name] if isinstance(value, Tensor)]
            numbers = iter(torch.stack(waiting).tolist())
            for name in [*ours, "entropy"]:  # TRL's mean may be over no token that was measured
                found = [next(numbers) if isinstance(value, Tensor) else value for value in metrics.pop(name, ())]
                if known := [number for number in found if not math.isnan(number)]:
                    metrics[name] = known
        super().log(logs, *more, **options)

    def _log_tokens(
        self, kept: Tensor, mask: Tensor, entropy: Tensor, advantages: Tensor, threshold: Tensor, measured: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logs what was kept of a micro-batch. Means of entropies are over the ``measured`` tokens, all kept ones among
        them. Returns, over all processes, the numbers of kept and of all tokens, and the mean entropy.
        """
        sums = token_sums(kept, mask, torch.where(measured, entropy, 0.0), advantages.unsqueeze(1))
        sums = torch.cat([sums, measured.sum(dtype=sums.dtype).unsqueeze(0)])
        totals: Tensor = self.accelerator.reduce(sums, reduction="sum")
        number, *_, of_kept, of_dropped, number_measured = totals
        metrics = token_metrics(totals[:-1], threshold, self._budget().token_ratio)
        self._log(metrics | {"d3s/entropy_dropped": of_dropped / (number_measured - number)})
        self._just_kept = HostNumber(number)
        return totals[:2].float(), (of_kept + of_dropped) / number_measured

    def _count_tokens(self) -> None:
        """Counts the kept tokens of a micro-batch whose loss was computed: TRL has waited for the device by then."""
        number, metrics = self._just_kept.value(), self._metrics["train"]
        # This part of the trainer's state goes into checkpoints, comes back from them, and is new in each run.
        counts = self.state.stateful_callbacks.setdefault("D3STrainer", {"num_tokens_kept": 0})
        counts["num_tokens_kept"] += number
        metrics["d3s/num_tokens_kept"] = [counts["num_tokens_kept"]]  # replaced: TRL logs means
        self._kept_in_update += number
        if self.accelerator.sync_gradients:  # the update's last micro-batch
            metrics["d3s/updates_without_tokens"].append(float(self._kept_in_update == 0))
            self._kept_in_update = 0
