"""Tries TRL's loss on a few made-up scores, to see that it is one whose gradient the selection of tokens can restrict.

Selection multiplies the gradient of each log-probability by 0, or by a weight that is known for each type of loss. This
is right for a loss that is a sum over tokens, divided by the known denominator. A term with another denominator, or one
that reads entropies, would get a wrong gradient without any error. Here such a term is seen by its gradient.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ..._gradient import DENOMINATORS
from ..batch import Batch, loss_mask
from .names import place
from .table import UnknownTRL

_APART = 0.05  # a log-ratio that no loss clips here


class _NoModel(torch.nn.Module):
    """Stands for the policy: a loss may ask whether it is trained, but scores come from one method alone."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UnknownTRL("the loss forwards the model outside of _get_per_token_logps_and_entropies")


def check_loss(trainer: Any, loss: Any) -> None:
    """Evaluates the loss three times on two short rows. All processes take part: TRL's metrics are gathered.

    Args:
        trainer: a trainer that was made. It is not changed.
        loss: TRL's ``_compute_loss``, a function of a trainer, a model and a batch.

    Raises:
        UnknownTRL: the loss needs something that is not known, scores more or less than once, or its gradient is not
            that of a sum over tokens with the known denominator.
    """
    probe = _Probe(trainer, loss)
    mask, divided_by = probe.mask, probe.denominator()

    same, of_entropy = probe.gradients([1.0, -0.5], torch.zeros(mask.shape))
    expected = torch.where(mask, torch.tensor([[-1.0], [0.5]]) / divided_by, 0.0)
    probe.require("of equal policies", same, expected)
    bonus = of_entropy[mask].mean() if trainer._entropy_bonus_enabled else torch.zeros(())
    probe.require("of entropies", of_entropy, torch.where(mask, bonus, 0.0))

    # Tokens that are all alike have the same gradient, but for the denominator, also in a KL term.
    apart = torch.full(mask.shape, 0.0 if trainer.loss_type == "vespo" else _APART)  # vespo takes sums of sequences
    alike, _ = probe.gradients([1.0, 1.0], apart, to_reference=_APART)
    probe.require("of tokens that are alike", alike, torch.where(mask, alike[0, 0] * divided_by[0] / divided_by, 0.0))

    if trainer._tokens_are_independent({}):  # then dropped tokens are not even scored
        kept = torch.arange(mask.shape[1]) < 1
        moved, _ = probe.gradients([1.0, 1.0], torch.where(kept, apart, -2 * apart), to_reference=_APART)
        probe.require("of a token while other tokens change", moved[:, kept], alike[:, kept])


class _Probe:
    """A copy of a trainer whose scores are made up."""

    def __init__(self, trainer: Any, loss: Any) -> None:
        self.loss, self.device = loss, trainer.accelerator.device
        self.trainer = made = object.__new__(type(trainer))
        vars(made).update(vars(trainer))
        made.model = _NoModel()
        made._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        made.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        made.args = copy.copy(trainer.args)
        # Nothing is clipped or masked away.
        made.args.delta, made.top_entropy_quantile = None, 1.0
        made.epsilon_low, made.epsilon_high = 0.5, 5.0
        if trainer.off_policy_mask_threshold is not None:
            made.off_policy_mask_threshold = math.inf
        made.beta = float(trainer.beta != 0)  # however small, a KL term is seen
        if trainer._espo:  # then each token has its own
            made.epsilon_low, made.epsilon_high = (
                torch.full((2, 5), value, device=self.device) for value in (made.epsilon_low, made.epsilon_high)
            )
        self.batch = self._batch()
        self.mask = loss_mask(self.batch).bool().cpu()

    def _batch(self) -> Batch:
        """Two rows with 3 and 2 tokens of the loss, beside one of a tool and padding."""
        ones = torch.ones(2, 5, dtype=torch.long, device=self.device)
        mask, tools = ones.clone(), ones.clone()
        mask[0, 4], mask[1, 2:], tools[0, 1] = 0, 0, 0
        tokens = (mask * tools).sum() * self.trainer.accelerator.num_processes
        return {
            "prompt_ids": ones[:, :1], "prompt_mask": ones[:, :1], "completion_ids": ones, "completion_mask": mask,
            "tool_mask": tools, "num_items_in_batch": tokens, "importance_sampling_ratio": ones[:, :1].float(),
        }  # fmt: skip

    def gradients(self, advantages: list[float], log_ratio: Tensor, to_reference: float = 0.0) -> tuple[Tensor, Tensor]:
        """The gradients of log-probabilities and of entropies, ``[2, 5]``, on the CPU.

        Args:
            advantages: of both rows.
            log_ratio: ``[2, 5]``, to the old policy.
            to_reference: log-ratio to the reference.
        """
        logprob = torch.full((2, 5), -1.0, device=self.device, requires_grad=True)
        entropy = torch.full((2, 5), 0.5, device=self.device, requires_grad=True)
        calls: list[bool] = []

        def score(*_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(compute_entropy)
            return logprob, entropy, torch.zeros((), device=self.device)

        self.trainer._get_per_token_logps_and_entropies = score
        old, rows = logprob.detach() - log_ratio.to(self.device), torch.tensor(advantages, device=self.device)
        batch = self.batch | {
            "advantages": rows[:, None].expand(2, 5) if self.trainer._espo else rows,  # ESPO has one for each token
            "old_per_token_logps": old, "sampling_per_token_logps": old,
            "ref_per_token_logps": logprob.detach() - to_reference,
        }  # fmt: skip
        try:
            value = self.loss(self.trainer, self.trainer.model, batch)
            found = torch.autograd.grad(value, (logprob, entropy), allow_unused=True, materialize_grads=True)
        except Exception as error:
            raise UnknownTRL(f"{place(self.loss)} failed on made-up scores: {type(error).__name__}: {error}") from error
        if calls != [True]:
            raise UnknownTRL(
                f"{place(self.loss)} scored tokens {len(calls)} times, {sum(calls)} of them with entropies; takes a "
                "loss that does so once, with entropies"
            )
        return found[0].cpu(), found[1].cpu()

    def denominator(self) -> Tensor:
        """``[2, 1]``: what the loss divides each row's tokens by."""
        made, mask = self.trainer, self.mask
        lengths, steps = mask.sum(dim=1, keepdim=True), made.args.gradient_accumulation_steps
        found: dict[str, Tensor] = {
            "sequence": 2 * lengths * steps,
            "sequences": torch.full_like(lengths, 2 * steps),
            "process": lengths.sum().expand(2, 1) * steps,
            "constant": torch.full_like(lengths, 2 * made.max_completion_length * steps),
            "generation": lengths.sum().expand(2, 1) * steps / made.args.steps_per_generation,
        }
        return found[DENOMINATORS[made.loss_type]]

    def require(self, what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.allclose(found, expected, rtol=1e-5):
            raise UnknownTRL(
                f"{place(self.loss)} with loss_type {self.trainer.loss_type!r}: got the gradient {_numbers(found)} "
                f"{what}; takes {_numbers(expected)}. The selection of tokens does not cover such a loss"
            )


def _numbers(values: Tensor) -> Any:
    return [round(value, 4) for value in values.flatten().tolist()]
