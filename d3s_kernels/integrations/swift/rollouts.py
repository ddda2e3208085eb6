"""Chooses rollouts between ms-swift's rewards and its first forward, so that dropped ones are never forwarded."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers.utils import get_even_process_data
from torch import Tensor

from ...metrics import rollout_metrics
from .._rewards import without_spread
from .run import NO_TEACHER, Run

Samples = list[Any]  # ms-swift's, one for each rollout of this process


def _length(sample: Any) -> int:
    """The tokens of a completion: ms-swift keeps a list of them, or one for each turn."""
    turns = sample.response_token_ids
    return sum(map(len, turns)) if turns and isinstance(turns[0], list) else len(turns)


class ChoosesRollouts(Run):
    """Chooses rollouts over all processes, by advantages that are ms-swift's own, of any of its estimators."""

    _everyone: Samples | None = None  # all rollouts of this process, also dropped ones; set while a batch is made
    _advantages: Tensor  # of all processes' rollouts
    _kept_advantages: Tensor | None = None  # of the kept ones among them; set while a batch is made

    def _score_completions(self, samples: Samples) -> Samples:
        samples = super()._score_completions(samples)
        if not self.model.training:
            return samples
        if self.dynamic_num_samples:
            raise ValueError("multi_turn_scheduler: got several samples of one rollout; D3S takes one of each")
        if any(one.teacher_prompt or one.teacher_images is not None for one in samples):
            raise ValueError(f"teacher_prompt, teacher_images: got a column of the dataset for a teacher; {NO_TEACHER}")
        self._everyone = samples
        self._advantages = super()._compute_advantages(samples, self._rewards_per_func, [])
        return self._keep_rollouts(samples)

    def _keep_rollouts(self, samples: Samples) -> Samples:
        accelerator, budget, n = self.accelerator, self._budget(), self.num_generations
        own = [[_length(one), self.overlong_filter and one.is_truncated] for one in samples]
        lengths, left_out = accelerator.gather(torch.tensor(own, device=accelerator.device)).unbind(dim=1)
        advantages = self._advantages.view(-1, n)
        kept = self._selection.rollouts(
            advantages,
            self._progress,
            has_tokens=(left_out == 0).view(-1, n),
            multiple_of=self._multiple,
            generator=self._draws_of_step(advantages.device),
        ).flatten()
        same = without_spread(self._rewards_per_func, self.reward_weights, n, self.scale_rewards == "gdpo")
        self._log(rollout_metrics(kept, lengths, same, budget.rollouts / n))
        self._kept_advantages = self._advantages_of(kept.view(-1, n), same)
        here = kept.view(accelerator.num_processes, -1)[accelerator.process_index].tolist()
        remaining = [sample for sample, stays in zip(samples, here, strict=True) if stays]
        if bool(kept.all()):
            return remaining
        evenly: Samples = get_even_process_data(self, gather_object(remaining))
        return evenly

    def _advantages_of(self, kept: Tensor, same: Tensor) -> Tensor:
        """The advantages of the kept rollouts, in their order; ``same`` marks the groups without a spread."""
        advantages = self._advantages.view_as(kept)
        anew = self._selection.advantages(advantages, kept, scale=self.scale_rewards, without_spread=same)
        return anew[kept]

    def _compute_advantages(self, samples: Samples, *arguments: Any) -> Tensor:
        """What ms-swift asks for once its batches are made: the advantages of the rollouts that are left."""
        if self._kept_advantages is not None:
            return self._kept_advantages
        theirs: Tensor = super()._compute_advantages(samples, *arguments)
        return theirs

    def _postprocess_batch(self, samples: Samples, batches: list[dict[str, Any]]) -> None:
        super()._postprocess_batch(samples, batches)
        if self._kept_advantages is not None:
            self._logs["advantages"].extend(self._advantages.tolist())  # as many as the log holds: it has no others
            self._kept_advantages = None

    def _log_rollout(self, samples: Samples) -> None:
        """ms-swift's table of completions, whose rewards and advantages are those of all rollouts, has all of them."""
        everyone, self._everyone = self._everyone, None
        super()._log_rollout(samples if everyone is None else everyone)
