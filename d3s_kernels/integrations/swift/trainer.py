"""ms-swift's ``GRPOTrainer`` with D3S's choice of rollouts and tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.utils import get_even_process_data
from torch import Tensor
from torch.nn.functional import pad

from ...selection.loss_weights import DENOMINATORS, gradient_weights, only_through
from ...selection.metrics import OFF_POLICY_SHARE, rollout_metrics, token_metrics, token_sums
from ...selection.selection import Selection
from .._transformers import RunWithBudget, total_rewards, without_spread
from .config import D3SConfig

Samples = list[Any]  # ms-swift's samples, one for each rollout of this process
Scores = tuple[Tensor, Tensor | None]  # log-probabilities and entropies, [rows, tokens]
_NO_TEACHER = "D3S takes none, since advantages of tokens come after the choice of rollouts"


class Kept(NamedTuple):
    """The kept tokens of a micro-batch, and the factor for each token's gradient."""

    tokens: Tensor  # bool [rows, tokens]
    weight: Tensor  # [rows, tokens]


class D3STrainer(RunWithBudget, GRPOTrainer):  # type: ignore[misc]  # ms-swift has no types
    """``GRPOTrainer`` of ms-swift, but it trains only on chosen rollouts and tokens. Evaluation does not change.

    Rollouts are chosen over all processes as soon as a generation batch has its rewards, and each process gets the same
    number of kept rollouts. Dropped rollouts are not encoded, and no forward pass includes them, not even the passes
    for old and reference log-probabilities.

    Tokens are ranked with entropies, which come from ms-swift's pass for the old log-probabilities. Exactly the
    budget's share of all processes' tokens is kept. The loss, including KL, is ms-swift's own, and covers all valid
    tokens of the kept rollouts. But gradient flows only through the kept tokens.

    Raises:
        TypeError: ``args`` is not a :class:`D3SConfig`.
        ValueError: the run has something that D3S does not support and that the configuration does not show, such as a
            teacher model.
        RuntimeError: in the first step, if the loss does not request the scores of the tokens exactly once.
    """

    args: D3SConfig
    _everyone: Samples | None = None  # this process's rollouts, including dropped ones; set only while a batch is made
    _advantages: Tensor  # the advantages of all processes' rollouts
    _kept_advantages: Tensor | None = None  # the advantages of kept rollouts; set only while a batch is made
    _draws_of_kept: Tensor  # the random numbers of this process's kept rollouts, if sequences are cut at random
    _choices_used = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if not isinstance(options["args"], D3SConfig):
            raise TypeError(f"args: got a {type(options['args']).__name__}; takes a D3SConfig")
        super().__init__(*arguments, **options)
        if self.template.sequence_parallel_size > 1:
            size = self.template.sequence_parallel_size
            raise ValueError(f"sequence_parallel_size: got {size}; D3S takes 1, where a process has whole sequences")
        if self._has_teacher_explicit():
            raise ValueError(f"teacher_model, teacher_model_server: got a teacher; {_NO_TEACHER}")
        self._selection = Selection(self.args)

    def _score_completions(self, samples: Samples) -> Samples:
        samples = super()._score_completions(samples)
        if not self.model.training:
            return samples
        if self.dynamic_num_samples:
            raise ValueError("multi_turn_scheduler: got several samples of one rollout; D3S takes one of each")
        if any(sample.teacher_prompt or sample.teacher_images is not None for sample in samples):
            raise ValueError(
                f"teacher_prompt, teacher_images: got a column of the dataset for a teacher; {_NO_TEACHER}"
            )
        self._everyone = samples
        self._advantages = super()._compute_advantages(samples, self._rewards_per_func, [])
        return self._keep_rollouts(samples)

    def _keep_rollouts(self, samples: Samples) -> Samples:
        """Chooses the rollouts. Returns the samples that this process keeps. Every process keeps the same number of
        samples.
        """
        accelerator, n = self.accelerator, self.num_generations

        def length(sample: Any) -> int:
            """Returns a completion's number of tokens. ms-swift stores one list of token ids, or a list per turn."""
            turns = sample.response_token_ids
            return sum(map(len, turns)) if turns and isinstance(turns[0], list) else len(turns)

        counts = [[length(sample), self.overlong_filter and sample.is_truncated] for sample in samples]
        lengths, left_out = accelerator.gather(torch.tensor(counts, device=accelerator.device)).unbind(dim=1)
        equal = without_spread(self._rewards_per_func, self.reward_weights, n, self.scale_rewards == "gdpo")
        # If the rewards of a group are equal, ms-swift's advantages are only rounding errors. A rollout without any
        # reward has the reward 0 in ms-swift, so the advantages of its group stay.
        unscored = self._rewards_per_func.isnan().all(dim=1).view(-1, n).any(dim=1)
        self._advantages = self._advantages.view(-1, n).masked_fill((equal & ~unscored).unsqueeze(1), 0.0).flatten()
        advantages = self._advantages.view(-1, n)
        kept = self._selection.rollouts(
            advantages, self._progress, has_tokens=(left_out == 0).view(-1, n), multiple_of=self._multiple,
            rewards=total_rewards(self._rewards_per_func, self.reward_weights).view(-1, n),
            generator=self._draws_of_step(advantages.device),
        )  # fmt: skip
        self._log(rollout_metrics(kept.flatten(), lengths, equal, kept.any(dim=1), self._budget().rollouts / n))
        anew = self._selection.advantages(advantages, kept, scale=self.scale_rewards, without_spread=equal)
        self._kept_advantages = anew[kept]
        if self._selection.cuts:  # the numbers go to the processes in the same way as the kept rollouts
            draws = accelerator.gather(self._draws_of_rollouts(advantages.flatten()[: len(samples)]))
            self._draws_of_kept = get_even_process_data(self, draws[kept.flatten()])
        here = kept.view(accelerator.num_processes, -1)[accelerator.process_index].tolist()
        remaining = [sample for sample, stays in zip(samples, here, strict=True) if stays]
        if bool(kept.all()):
            return remaining
        evenly: Samples = get_even_process_data(self, gather_object(remaining))
        return evenly

    def _compute_advantages(self, samples: Samples, *arguments: Any) -> Tensor:
        """Returns the advantages of the kept rollouts if rollouts were chosen, else the advantages that ms-swift
        computes.
        """
        if self._kept_advantages is not None:
            return self._kept_advantages
        theirs: Tensor = super()._compute_advantages(samples, *arguments)
        return theirs

    def _get_per_token_logps_and_entropies(
        self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, compute_entropy: bool = False, **options: Any
    ) -> Scores:
        # ms-swift's first pass over a batch is for the old log-probabilities. This pass computes the entropies too.
        choosing = self._everyone is not None and grpo_batch.old_per_token_logps is None
        logprob, entropy = super()._get_per_token_logps_and_entropies(
            model, model_inputs, grpo_batch, compute_entropy=compute_entropy or choosing, **options
        )
        if choosing:
            grpo_batch.d3s_entropy = entropy.float()
        kept: Kept | None = getattr(grpo_batch, "d3s_kept", None)
        if kept is not None and logprob.requires_grad:
            logprob.register_hook(only_through(*kept))
            self._choices_used += 1
        return logprob, entropy

    def _postprocess_batch(self, samples: Samples, batches: list[dict[str, Any]]) -> None:
        super()._postprocess_batch(samples, batches)
        if self._kept_advantages is not None:
            # ms-swift has just logged the advantages of only the kept rollouts, in a deque with room for one generation
            # batch. Appending the advantages of all rollouts therefore removes the advantages that ms-swift logged.
            self._logs["advantages"].extend(self._advantages.tolist())
            self._kept_advantages = None
            self._choose_tokens(samples, [batch["grpo_batch"] for batch in batches])

    def _choose_tokens(self, samples: Samples, parts: list[Any]) -> None:
        """Chooses exactly the budget's share of all processes' tokens, and stores the choice in each micro-batch."""
        masks = [part.completion_mask.bool() for part in parts]
        if self.overlong_filter:  # ms-swift's loss leaves out truncated completions
            masks = [mask & ~part.truncated_mask.unsqueeze(1) for mask, part in zip(masks, parts, strict=True)]
        widest, rows = max(mask.shape[1] for mask in masks), [len(mask) for mask in masks]

        def together(values: list[Tensor]) -> Tensor:
            return torch.cat([pad(value, (widest - value.shape[1], 0)) for value in values])

        def apart(values: Tensor) -> list[Tensor]:
            split = zip(torch.split(values, rows), masks, strict=True)
            return [value[:, widest - mask.shape[1] :] for value, mask in split]

        mask, advantages = together(masks), torch.stack([sample.advantages for sample in samples]).to(masks[0].device)
        entropy = together([part.d3s_entropy for part in parts]).masked_fill(~mask, 0.0)
        log_p = log_q = None
        if ruled := self.args.off_policy_rule != "none":
            sampled = [part.rollout_per_token_logps for part in parts]  # None if any rollout of the part has no values
            if not any(gather_object([logps is not None for logps in sampled])):
                raise ValueError(
                    f"d3s_off_policy_rule: got {self.args.off_policy_rule!r}, and rollouts without log-probabilities; "
                    "takes vLLM, which returns them"
                )
            old = [part.old_per_token_logps for part in parts]
            log_p = together(old)
            log_q = together(
                [torch.full_like(p.float(), math.nan) if q is None else q for p, q in zip(old, sampled, strict=True)]
            )
        group = self._process_group
        trusted = self._selection.trusted(log_p, log_q, advantages, mask=mask, process_group=group)
        candidates: Any = trusted
        if self._selection.cuts:
            candidates = self._selection.prefixes(trusted, self._progress, draws=self._draws_of_kept)
        chosen = self._selection.tokens(entropy, advantages, self._progress, mask=candidates, process_group=group)
        weights = trusted.weight if chosen.weight is None else trusted.weight * chosen.weight
        sums = token_sums(chosen.mask, mask, entropy, advantages.unsqueeze(1))
        sums = self.accelerator.reduce(sums, reduction="sum")
        share = trusted.count / sums[1] if ruled else torch.ones_like(sums[1])
        metrics = token_metrics(sums, chosen.threshold, self._selection.token_share(self._progress))
        if ruled:
            metrics[OFF_POLICY_SHARE] = 1 - share
        del metrics["d3s/head_rows_not_computed"]  # ms-swift's head computes all rows
        self._log(metrics)

        split = zip(parts, apart(chosen.mask), apart(trusted.mask), apart(weights), strict=True)
        for part, tokens, left, of_tokens in split:
            weight = torch.ones((), device=tokens.device)
            if self.args.loss_denominator == "kept":
                # The losses dapo and cispo divide by ms-swift's num_items_in_batch, which also counts the tokens of
                # truncated completions.
                items = part.num_items_in_batch if DENOMINATORS[self.loss_type] == "generation" else sums[1]
                items = torch.as_tensor(items, dtype=sums.dtype, device=sums.device) * share
                weight, _ = gradient_weights(self.loss_type, tokens, left, torch.stack([sums[0], items]).float())
            part.d3s_kept = Kept(tokens, weight * of_tokens)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._choices_used = 0
        loss = super().compute_loss(model, inputs, *arguments, **options)
        if self.model.training and self._choices_used != 1:
            raise RuntimeError(
                f"ms-swift's loss with loss_type {self.loss_type!r}: asked {self._choices_used} times for scores of "
                "tokens with a gradient; takes one that asks once"
            )
        return loss

    def _log_rollout(self, samples: Samples) -> None:
        """Logs all rollouts, since ms-swift's table of completions has the rewards and advantages of all rollouts."""
        everyone, self._everyone = self._everyone, None
        super()._log_rollout(samples if everyone is None else everyone)

    def _log(self, metrics: dict[str, Tensor]) -> None:
        """Stores the values of 0-d tensors as Python floats for ms-swift's next log. NaN is not logged."""
        numbers = torch.stack([value.double() for value in metrics.values()]).tolist()
        for name, number in zip(metrics, numbers, strict=True):
            if not math.isnan(number):
                self._metrics["train"][name].append(number)
