"""Overrides three parts of TRL's trainer: the calls that score tokens, the passes without gradient before the update,
and the log.

The overridden methods are private to TRL and may change without notice, and a subclass may override them too. In both
cases, the gradient could be wrong without an error. So this package's ``__init__`` checks TRL's version, this module
checks which passes TRL makes over a generation batch, and :mod:`.trainer` checks in each step that the selection was
applied. ``tests/trainers/trl_surface.py`` lists what we rely on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import disable_gradient_checkpointing, use_adapter

from ...selection.metrics import LARGEST
from .._transformers import RunWithBudget
from .batch import FIELDS, IMAGES, PREFIX, SETS, Batch, take
from .columns import MayCut, cut, divided_by_work, last_columns, row_lengths, trimmed, what_may_be_cut
from .config import D3SConfig
from .head import OverSets, over_sets

Scores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities, entropies, router loss
OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"  # batch fields with results of passes without gradient
RATIO = "importance_sampling_ratio"  # a batch field: TRL's factors where it corrects vLLM's probabilities


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
    more: tuple[Any, ...]  # further arguments; the first one is the number of rows that TRL scores at a time
    options: dict[str, Any]  # further arguments by name: what to compute, and images

    def scores(self) -> Scores:
        return self.method(self.model, self.tokens, self.attention, self.columns, *self.more, **self.options)


def both_sides(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the ids of prompts with their completions, and their attention mask."""
    ids, mask = (torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))
    return ids, mask


def _on_host(lists: list[list[Any]]) -> list[list[float]]:
    """Returns the lists with a number in place of each 0-d tensor. There is one host sync for all of them."""
    waiting = [value.double() for values in lists for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(waiting).tolist())
    return [[next(numbers) if isinstance(value, Tensor) else value for value in values] for values in lists]


class Scoring(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's trainer with two changes. It collects our metrics without a host sync. It also postpones the passes that
    only the update needs, until the rollouts are chosen.
    """

    args: D3SConfig
    rollout_func: Callable[..., Any] | None
    _passes: Passes | None = None  # set only while TRL makes a generation batch
    _weights: dict[str, list[Any]]  # for the next log, by the name of the metric

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._weights = defaultdict(list)
        super().__init__(*arguments, **options)
        if self.rollout_func is not None:
            self.rollout_func = self._with_whole_logprobs(self.rollout_func)

    def _with_whole_logprobs(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a ``rollout_func``: refuses rows with too few or too many log-probabilities if anything reads them. TRL
        pads short rows with 0, as if these tokens had been sampled with the probability 1.
        """

        @wraps(rollout_func)
        def generate(prompts: list[Any], trainer: Any) -> Any:
            output = rollout_func(prompts, trainer)
            read = self.args.off_policy_rule != "none" or self.off_policy_mask_threshold is not None
            rows = (output.get("logprobs") if read or self._corrects_sampling else None) or []
            for row, (logprobs, ids) in enumerate(zip(rows, output.get("completion_ids", []), strict=False)):
                if len(logprobs) != len(ids):
                    raise ValueError(
                        f"rollout_func: got {len(logprobs)} logprobs for {len(ids)} completion_ids of rollout {row}; "
                        "takes one for each, which is None where it is not known"
                    )
            return output

        return generate

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def _may_cut(self, columns: int) -> MayCut:
        return what_may_be_cut(self.model.config.get_text_config(), columns)

    def _log(self, metrics: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> None:
        """Stores 0-d tensors for the next log. Only the log causes a host sync. NaN is not logged.

        A logged value is a mean over micro-batches. ``weights`` says, for some metrics of the latest micro-batch, of
        how many tokens or rows they are means. Micro-batches may differ in these numbers, so the log weights them.
        TRL's own metrics may have weights too.
        """
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        for name, weight in (weights or {}).items():
            self._weights[name].append(weight)

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        metrics = self._metrics["train"]
        # During an evaluation, the training metrics are not touched: they wait for the next log of the training.
        if self.model.training and any(name.startswith("d3s/") for name in metrics):
            weights, self._weights = self._weights, defaultdict(list)
            names = [name for name in metrics if name.startswith("d3s/") or name in weights]
            lists = _on_host([metrics.pop(name) for name in names] + [weights[name] for name in names])
            for name, values, own in zip(names, lists, lists[len(names) :], strict=False):
                # Other code may have changed the list, which is TRL's. Then the weights belong to other values. If all
                # weights are 0, TRL's own metrics are 0.
                pairs = zip(values, own if len(own) == len(values) and any(own) else [1] * len(values), strict=True)
                # NaN is a mean over nothing. TRL's "entropy" is NaN if no token's entropy is known.
                if known := [(value, weight) for value, weight in pairs if not math.isnan(value)]:
                    total = sum(weight for _, weight in known) or 1
                    mean = sum(value * weight for value, weight in known) / total
                    metrics[name] = [max(values) if name == LARGEST else mean]
        super().log(logs, *more, **options)

    @property
    def _corrects_sampling(self) -> bool:
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    @property
    def _tokens_before_update(self) -> bool:
        if self.args.entropy_from == "auto":
            known = self.args.off_policy_rule != "none" or self.args.token_rule == "prefix"
            return known or OLD in self._pass_names()
        return self.args.entropy_from == "rollout"

    @property
    def _entropies_before_update(self) -> bool:
        """Returns whether the update needs the entropies of an earlier pass: to choose tokens before, or for ESPO."""
        of_espo = self.args.importance_sampling_level == "entropy_group"
        return self._tokens_before_update and (self.args.token_rule != "prefix" or of_espo)

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
        with_entropy = call._replace(options=call.options | {"compute_entropy": self._entropies_before_update})
        logprob, passes.entropy, aux = self._scores_of_pass(with_entropy)
        return logprob, None, aux

    def _scores_of_pass(self, call: Call) -> Scores:
        """Makes a pass without gradient. If there are more rows than ``batch_size``, TRL scores so many at a time, with
        all columns. This method then makes as many forwards, but of rows of similar lengths, each cut to its own
        columns. Columns that are cut off get 0.
        """
        options, rows = {"batch_size": None} | call.options, len(call.tokens)
        model: Any = call.model
        size = call.more[0] if call.more else options["batch_size"]
        prompt, may_cut = call.tokens.shape[1] - call.columns, self._may_cut(call.tokens.shape[1])
        if (
            size is None
            or rows <= size
            or len(call.more) > 1
            or self.args.order_rows == "none"
            or not may_cut.completions
        ):
            return call.scores()
        batch = {name: value for name, value in options.items() if name in IMAGES and value is not None}
        batch |= {"prompt_ids": call.tokens[:, :prompt], "prompt_mask": call.attention[:, :prompt]}
        batch |= {"completion_ids": call.tokens[:, prompt:], "completion_mask": call.attention[:, prompt:]}
        if isinstance(model, OverSets):
            model, batch[SETS] = model.model, model.sets
        options = {name: value for name, value in options.items() if name not in (*IMAGES, "batch_size")}
        logprob, entropy = [], []
        parts = divided_by_work(row_lengths(batch), -(-rows // size), prompt, may_cut, self.pad_to_multiple_of)
        for part in parts:
            chunk = cut(take(batch, part.rows), part.prompt_width, part.width)
            images = {name: chunk[name] for name in IMAGES if name in chunk}
            columns = chunk["completion_ids"].shape[1]
            tokens, attention = both_sides(chunk)
            scores = call.method(over_sets(model, chunk.get(SETS)), tokens, attention, columns, **options, **images)
            logprob.append(pad(scores[0], (0, call.columns - columns)))
            if scores[1] is not None:
                entropy.append(pad(scores[1], (0, call.columns - columns)))
        back = torch.cat([part.rows for part in parts]).argsort()
        return torch.cat(logprob)[back], torch.cat(entropy)[back] if entropy else None, None

    def _postponed(self, name: str, batch: Batch) -> Batch:
        """Makes a postponed pass over the chosen rollouts. Returns the batch fields that the pass fills."""
        if name == OLD:
            logprob, entropy, _ = self._score(self.model, batch, compute_entropy=self._entropies_before_update)
            return {name: logprob} if entropy is None else {name: logprob, "d3s_entropy": entropy}
        if self.ref_model is not None:
            return {name: self._score(self.ref_model, batch)[0]}
        policy = self.accelerator.unwrap_model(self.model)  # the reference is the policy with another adapter, or none
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return {name: self._score(self.model, batch)[0]}

    def _score(self, model: Any, batch: Batch, **options: Any) -> Scores:
        """Runs TRL's scoring pass over the rows of a batch, without gradient. What comes after a cut is not forwarded
        if the update does not need it.
        """
        all_columns = batch["completion_ids"].shape[1]
        if PREFIX in batch and self._tokens_are_independent(batch):
            rest = last_columns(batch[PREFIX]).unsqueeze(1) <= torch.arange(all_columns, device=batch[PREFIX].device)
            batch = batch | {"completion_mask": batch["completion_mask"].masked_fill(rest, 0)}
            batch = trimmed(batch, self.pad_to_multiple_of, self._may_cut(batch["prompt_mask"].shape[1] + all_columns))
        tokens, attention = both_sides(batch)
        images = {name: batch[name] for name in IMAGES if name in batch}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            scores: Scores = self._get_per_token_logps_and_entropies(
                over_sets(model, batch.get(SETS)), tokens, attention, batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size, **images, **options,
            )  # fmt: skip
        if (after := all_columns - batch["completion_ids"].shape[1]) == 0:
            return scores
        logprob, entropy, aux = scores
        return pad(logprob, (0, after)), None if entropy is None else pad(entropy, (0, after)), aux

    def _tokens_are_independent(self, inputs: Batch) -> bool:
        """Returns whether each token's gradient depends only on the token's own log-probability. If so, dropped tokens
        need not be scored.
        """
        return bool(
            self.importance_sampling_level == "token"
            and self.args.importance_sampling_level != "entropy_group"
            and self.loss_type != "vespo"
            and self.beta == 0
            and self.off_policy_mask_threshold is None
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
            and "num_images" not in inputs
        )
