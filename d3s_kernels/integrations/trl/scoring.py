"""TRL's calls for scores of tokens, its passes without gradient before the update, and its log."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import disable_gradient_checkpointing, use_adapter

from .._run import RunWithBudget
from .batch import IMAGES, SETS, Batch
from .config import D3SConfig
from .head import over_sets
from .surface import OLD, REFERENCE, Passes

Scores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, router loss


class Call(NamedTuple):
    """A call of TRL's method that scores tokens."""

    method: Callable[..., Scores]
    model: Any
    tokens: Tensor
    attention: Tensor
    columns: int  # how many of the last columns are scored

    def scores(self, **options: Any) -> Scores:
        return self.method(self.model, self.tokens, self.attention, self.columns, **options)


class Scoring(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer, with our metrics collected without a host sync. Passes that only the update needs are postponed
    until the rollouts are chosen.
    """

    args: D3SConfig
    _passes: Passes | None = None  # set only while TRL makes a generation batch

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def _log(self, metrics: dict[str, Tensor]) -> None:
        """Keeps 0-d tensors until the next log, which has the only host sync. NaN is not logged."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        metrics = self._metrics["train"]
        # The log of an evaluation leaves training metrics for the next log of training.
        ours = [name for name in metrics if name.startswith("d3s/")] if self.model.training else []
        if ours:
            waiting = [value.double() for name in ours for value in metrics[name] if isinstance(value, Tensor)]
            numbers = iter(torch.stack(waiting).tolist())
            for name in [*ours, "entropy"]:  # TRL's mean is NaN if no token was measured
                found = [next(numbers) if isinstance(value, Tensor) else value for value in metrics.pop(name, ())]
                if known := [number for number in found if not math.isnan(number)]:
                    metrics[name] = known
        super().log(logs, *more, **options)

    @property
    def _corrects_sampling(self) -> bool:
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    @property
    def _tokens_before_update(self) -> bool:
        source, ruled = self.args.entropy_from, self.args.off_policy_rule != "none"
        return bool(source == "rollout" or (source == "auto" and (ruled or OLD in self._pass_names())))

    def _pass_names(self) -> list[str]:
        """The passes without gradient that TRL makes over a generation batch, by TRL's own conditions."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        names = [] if aligned and not self._corrects_sampling else [OLD]
        return names if self.beta == 0 else [*names, REFERENCE]

    def _is_reference(self, model: Any) -> bool:
        """Whether this model is the reference: a separate model, or the policy with its adapter off or replaced."""
        if self.ref_model is not None:
            return bool(model is self.ref_model)
        policy = self.accelerator.unwrap_model(self.model)
        if getattr(policy, "peft_config", None) is None:
            return False
        # On adapter layers this is a property; on transformers' models it is a method.
        switched_off = any(getattr(module, "disable_adapters", None) is True for module in policy.modules())
        return switched_off or bool(policy.active_adapter == "ref")

    def _score_before_rewards(self, call: Call, passes: Passes) -> Scores:
        """Postpones TRL's passes for log-probabilities that only the update needs, until the rollouts are chosen."""
        name = passes.next(self._is_reference(call.model))
        needed_at_once = name == OLD and self._corrects_sampling
        if not needed_at_once:
            return passes.postpone(name, len(call.tokens), call.columns), None, None
        logprob, passes.entropy, aux = call.scores(compute_entropy=self._tokens_before_update)
        return logprob, None, aux

    def _postponed(self, name: str, batch: Batch) -> Batch:
        """Makes a pass that was postponed until the rollouts were chosen. Returns the batch fields that it fills."""
        if name == OLD:
            logprob, entropy, _ = self._score(self.model, batch, compute_entropy=self._tokens_before_update)
            return {name: logprob} if entropy is None else {name: logprob, "d3s_entropy": entropy}
        if self.ref_model is not None:
            return {name: self._score(self.ref_model, batch)[0]}
        policy = self.accelerator.unwrap_model(self.model)  # the reference is the policy with another adapter
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return {name: self._score(self.model, batch)[0]}

    def _score(self, model: Any, batch: Batch, **options: Any) -> Scores:
        """TRL's scoring pass without gradient, over the rows of a batch."""
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        images = {name: batch[name] for name in IMAGES if name in batch}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            scores: Scores = self._get_per_token_logps_and_entropies(
                over_sets(model, batch.get(SETS)), tokens, attention, batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size, **images, **options,
            )  # fmt: skip
        return scores
