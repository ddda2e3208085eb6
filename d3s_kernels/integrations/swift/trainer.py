"""ms-swift's ``GRPOTrainer`` with D3S's choice of rollouts and tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...metrics import token_metrics, token_sums
from .._gradient import DENOMINATORS, gradient_weights, only_through
from .rollouts import ChoosesRollouts, Samples

Scores = tuple[Tensor, Tensor | None]  # log-probabilities and entropies, [rows, tokens]


class Kept(NamedTuple):
    """The kept tokens of a micro-batch."""

    tokens: Tensor
    """bool ``[rows, tokens]``."""
    weight: Tensor
    """What the gradient of the loss is multiplied by, 0-d or ``[rows, 1]``."""


class D3STrainer(ChoosesRollouts):
    """``GRPOTrainer`` of ms-swift that trains on the rollouts and the tokens that D3S chooses.

    Rollouts: once a generation batch has its rewards, rollouts are chosen over all processes, and each process gets the
    same number. Dropped rollouts are not encoded and enter no forward, for old and reference log-probabilities neither.

    Tokens: ms-swift makes a pass for old log-probabilities over each generation batch. It gives the entropies, and
    exactly the share of the tokens of all processes is kept. The loss is ms-swift's own, over all valid tokens of the
    kept rollouts, but gradient flows only through the kept tokens, also that of KL.

    Evaluation is ms-swift's.

    Raises:
        TypeError, ValueError: as :class:`.run.Run`.
        RuntimeError: in the first step, if the loss does not score tokens in the way that is known.
    """

    _choices_used = 0

    def _get_per_token_logps_and_entropies(
        self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, compute_entropy: bool = False, **options: Any
    ) -> Scores:
        # A batch gets its old log-probabilities first, from the policy.
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
        if self._everyone is not None:
            self._choose_tokens(samples, [batch["grpo_batch"] for batch in batches])

    def _choose_tokens(self, samples: Samples, parts: list[Any]) -> None:
        """Gives each micro-batch its kept tokens: exactly the budget's share, over all of them and all processes."""
        masks = [self._loss_mask(part) for part in parts]
        widest, rows = max(own.shape[1] for own in masks), [len(own) for own in masks]

        def together(values: list[Tensor]) -> Tensor:
            return torch.cat([pad(value, (widest - value.shape[1], 0)) for value in values])

        mask, advantages = together(masks), torch.stack([sample.advantages for sample in samples]).to(masks[0].device)
        entropy = together([torch.where(own, part.d3s_entropy, 0.0) for own, part in zip(masks, parts, strict=True)])
        chosen = self._selection.tokens(
            entropy, advantages, self._progress, mask=mask, process_group=self._process_group
        )
        sums = token_sums(chosen.mask, mask, entropy, advantages.unsqueeze(1))
        sums = self.accelerator.reduce(sums, reduction="sum")
        metrics = token_metrics(sums, chosen.threshold, self._budget().token_ratio)
        del metrics["d3s/head_rows_not_computed"]  # ms-swift's head computes them all
        self._log(metrics)
        kept = [of[:, widest - own.shape[1] :] for of, own in zip(torch.split(chosen.mask, rows), masks, strict=True)]
        counts = torch.stack([torch.stack([of.sum(), own.sum()]) for of, own in zip(kept, masks, strict=True)])
        counts = self.accelerator.reduce(counts.float(), reduction="sum")  # [micro-batches, kept and all]
        for part, tokens, own, of_processes in zip(parts, kept, masks, counts, strict=True):
            weight = torch.ones((), device=tokens.device)
            if self.args.loss_denominator == "kept":
                # ms-swift's number counts the tokens of truncated completions too; dapo and cispo divide by it.
                items = part.num_items_in_batch if DENOMINATORS[self.loss_type] == "generation" else sums[1].float()
                whole = {"num_items_in_batch": items, "d3s_tokens_kept": sums[0].float()}
                weight, _ = gradient_weights(self.loss_type, tokens, own, whole, of_processes)
            part.d3s_kept = Kept(tokens, weight)

    def _loss_mask(self, part: Any) -> Tensor:
        """The tokens that are in ms-swift's loss: with ``overlong_filter``, none of a truncated completion."""
        mask: Tensor = part.completion_mask.bool()
        return mask & ~part.truncated_mask.unsqueeze(1) if self.overlong_filter else mask

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._choices_used = 0
        loss = super().compute_loss(model, inputs, *arguments, **options)
        if self.model.training and self._choices_used != 1:
            raise RuntimeError(
                f"ms-swift's loss with loss_type {self.loss_type!r}: asked {self._choices_used} times for scores of "
                "tokens with a gradient; takes one that asks once"
            )
        return loss
