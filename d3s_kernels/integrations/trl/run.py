"""What the choices of rollouts and of tokens both need of a run: its processes, its budget and its log."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from .._run import RunWithBudget
from ..metrics import token_metrics, token_sums
from .config import D3SConfig


class Run(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer with a budget that follows the run, and a log of our metrics that waits for no device."""

    args: D3SConfig
    _num_tokens_kept: Tensor | None = None  # None until the first micro-batch

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
            numbers = iter(torch.stack([value.double() for name in ours for value in metrics[name]]).tolist())
        for name in ours:
            metrics[name] = [number for _ in metrics[name] if not math.isnan(number := next(numbers))]
            if not metrics[name]:
                del metrics[name]
        super().log(logs, *more, **options)

    def _log_tokens(self, kept: Tensor, mask: Tensor, entropy: Tensor, advantages: Tensor, threshold: Tensor) -> Tensor:
        """Logs what was kept. Returns the numbers of kept and of all tokens, over all processes."""
        sums = token_sums(kept, mask, entropy, advantages.unsqueeze(1))
        totals: Tensor = self.accelerator.reduce(sums, reduction="sum")
        number = totals[0]
        if self._num_tokens_kept is None:  # a resumed run continues from its last logged value
            logged = [row["d3s/num_tokens_kept"] for row in self.state.log_history if "d3s/num_tokens_kept" in row]
            self._num_tokens_kept = torch.full_like(number, logged[-1] if logged else 0)
        self._num_tokens_kept = self._num_tokens_kept + number
        self._metrics["train"]["d3s/num_tokens_kept"] = [self._num_tokens_kept]  # replaced: TRL logs means
        self._log(token_metrics(totals, threshold, self._budget().token_ratio))
        return totals[:2].float()
