"""Overrides three parts of TRL's trainer: the calls that score tokens, the passes without gradient before the update,
and the log.

The overridden methods are private to TRL and may change without notice, and a subclass may override them too. In both
cases, the gradient could be wrong without an error. So this package's ``__init__`` checks TRL's version, this module
checks which passes TRL makes over a generation batch, and :mod:`.trainer` checks in each step that the selection was
applied. ``tests/trainers/trl_surface.py`` lists what we rely on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import disable_gradient_checkpointing, use_adapter

from .._transformers import RunWithBudget
from .batch import FIELDS, IMAGES, SETS, Batch
from .config import D3SConfig
from .head import over_sets

Scores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, router loss
OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"  # batch fields with results of passes without gradient


class UnknownTRL(RuntimeError):
    """The error if TRL, or a subclass of our trainer, does something that the selection does not support."""


class Passes:
    """The passes without gradient over one generation batch. Some are postponed until the rollouts are chosen."""

    def __init__(self, names: list[str]) -> None:
        self.names = names  # the passes that TRL has not asked for yet, each named after the batch field that it fills
        self.postponed: dict[str, Tensor] = {}  # the placeholders that were returned to TRL, by the name of the pass
        self.entropy: Tensor | None = None

    def next(self, of_reference: bool) -> str:
        """Returns the name of the pass that TRL asks for now, and removes it from ``names``."""
        name = REFERENCE if of_reference and REFERENCE in self.names else self.names[0]
        self.names.remove(name)
        return name

    def postpone(self, name: str, rows: int, columns: int) -> Tensor:
        """Postpones a pass, and returns a placeholder for the pass's result. A plain tensor on the meta device would
        not be enough: torch adds such a tensor to another tensor in place without an error.
        """
        self.postponed[name] = torch.empty(rows, columns, device="meta").as_subclass(_Postponed)
        return self.postponed[name]

    def without_postponed(self, batch: Batch) -> Batch:
        """Returns TRL's batch without the placeholders of postponed passes. Raises an UnknownTRL in three cases: TRL
        skipped a pass; TRL put the result of a pass into another field; or the batch has a field whose padding side is
        unknown.
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
    """The placeholder for log-probabilities that are not computed yet. Any use of it raises an error."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        raise UnknownTRL(
            f"_generate_and_score_completions: {name} reads log-probabilities before the rollouts are chosen; these "
            "are scored afterwards, since neither rewards nor advantages need them in the versions that were tested"
        )


class Call(NamedTuple):
    """A call of TRL's method that scores tokens."""

    method: Callable[..., Scores]
    model: Any
    tokens: Tensor
    attention: Tensor
    columns: int  # the number of scored columns, the last ones of ``tokens``

    def scores(self, **options: Any) -> Scores:
        return self.method(self.model, self.tokens, self.attention, self.columns, **options)


class Scoring(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer with two changes. It collects our metrics without a host sync. It also postpones the passes that
    only the update needs, until the rollouts are chosen.
    """

    args: D3SConfig
    _passes: Passes | None = None  # set only while TRL makes a generation batch

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def _log(self, metrics: dict[str, Tensor]) -> None:
        """Stores 0-d tensors for the next log. Only the log causes a host sync. NaN is not logged."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        metrics = self._metrics["train"]
        # During an evaluation, the training metrics are not touched: they wait for the next log of the training.
        ours = [name for name in metrics if name.startswith("d3s/")] if self.model.training else []
        if ours:
            waiting = [value.double() for name in ours for value in metrics[name] if isinstance(value, Tensor)]
            numbers = iter(torch.stack(waiting).tolist())
            for name in [*ours, "entropy"]:  # TRL's "entropy" is NaN if no token's entropy is known
                values = [next(numbers) if isinstance(value, Tensor) else value for value in metrics.pop(name, ())]
                if known := [value for value in values if not math.isnan(value)]:
                    metrics[name] = known
        super().log(logs, *more, **options)

    @property
    def _corrects_sampling(self) -> bool:
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    @property
    def _tokens_before_update(self) -> bool:
        if self.args.entropy_from == "auto":
            return self.args.off_policy_rule != "none" or OLD in self._pass_names()
        return self.args.entropy_from == "rollout"

    def _pass_names(self) -> list[str]:
        """Returns the names of the passes without gradient that TRL makes over a generation batch. TRL has the same
        conditions.
        """
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        names = [] if aligned and not self._corrects_sampling else [OLD]
        return names if self.beta == 0 else [*names, REFERENCE]

    def _is_reference(self, model: Any) -> bool:
        """Returns whether ``model`` is the reference model: either a model of its own, or the policy with its adapter
        switched off or replaced by the adapter "ref".
        """
        if self.ref_model is not None:
            return bool(model is self.ref_model)
        policy = self.accelerator.unwrap_model(self.model)
        if getattr(policy, "peft_config", None) is None:
            return False
        # ``disable_adapters`` is a property of adapter layers, but a method of transformers' models.
        switched_off = any(getattr(module, "disable_adapters", None) is True for module in policy.modules())
        return switched_off or bool(policy.active_adapter == "ref")

    def _score_before_rewards(self, call: Call, passes: Passes) -> Scores:
        """Makes the pass that TRL asks for before it computes rewards. If only the update needs the pass, postpones it
        instead.
        """
        name = passes.next(self._is_reference(call.model))
        if name != OLD or not self._corrects_sampling:
            return passes.postpone(name, len(call.tokens), call.columns), None, None
        logprob, passes.entropy, aux = call.scores(compute_entropy=self._tokens_before_update)
        return logprob, None, aux

    def _postponed(self, name: str, batch: Batch) -> Batch:
        """Makes a postponed pass over the chosen rollouts. Returns the batch fields that the pass fills."""
        if name == OLD:
            logprob, entropy, _ = self._score(self.model, batch, compute_entropy=self._tokens_before_update)
            return {name: logprob} if entropy is None else {name: logprob, "d3s_entropy": entropy}
        if self.ref_model is not None:
            return {name: self._score(self.ref_model, batch)[0]}
        policy = self.accelerator.unwrap_model(self.model)  # the reference is the policy with another adapter, or none
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return {name: self._score(self.model, batch)[0]}

    def _score(self, model: Any, batch: Batch, **options: Any) -> Scores:
        """Runs TRL's scoring pass over the rows of a batch, without gradient."""
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        images = {name: batch[name] for name in IMAGES if name in batch}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            scores: Scores = self._get_per_token_logps_and_entropies(
                over_sets(model, batch.get(SETS)), tokens, attention, batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size, **images, **options,
            )  # fmt: skip
        return scores
