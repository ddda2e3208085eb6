"""Chooses the tokens that get a gradient, either for a whole generation batch before its updates, or for each
micro-batch separately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...off_policy.importance_ratio import espo_terms
from ...off_policy.trusted_tokens import TrustedTokens
from ...selection.loss_weights import gradient_weights, only_through
from ...tokens.random_prefixes import Prefixes
from ...tokens.select_tokens import TokenSelection
from .batch import DRAWS, PREFIX, PREFIX_WEIGHT, SETS, SHARED, UNMEASURED, Batch, loss_mask, take
from .columns import last_columns
from .config import D3SConfig
from .counts import CountsTokens
from .head import HostNumber, OurHead, over_sets
from .page import PageOfBatch
from .scoring import OLD, RATIO, Call, Scores, Scoring

LOGPROB = "d3s_logprob"  # a batch field: the log-probabilities of the pass for entropies
ASKED = "d3s_token_share_asked"  # a batch field: the budget's share of tokens when the tokens were chosen


class ChoosesTokens(CountsTokens, Scoring):
    """TRL's trainer, but gradient flows only through chosen tokens. TRL's loss still gets the scores of all tokens."""

    epsilon_low: Any  # a float, as in TRL; while TRL computes ESPO's loss, a tensor with a value for each token
    epsilon_high: Any
    _gradient_was_selected = False  # whether a gradient has reached the hook in _score_for_loss in this step
    _loss_inputs: Batch | None = None  # set only while TRL computes a training loss
    # Numbers of tokens in the latest micro-batch, over all processes: the kept ones, all, those whose loss has a weight
    # above 0, and the kept ones of these.
    _just_counted = HostNumber(torch.zeros(4))
    _wider_bounds = (
        "those of off_policy_rule, or vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max"
    )
    _page: PageOfBatch | None = None  # set while the trainer trains on a generation batch that gets a page

    @property
    def _espo(self) -> bool:
        return self.args.importance_sampling_level == "entropy_group"

    def _choose_tokens_of_batch(self, batch: Batch) -> None:
        """Chooses the tokens of a whole generation batch, and stores the choice in the batch."""
        mask, ratio, rule = loss_mask(batch).bool(), batch.get(RATIO), self.args.off_policy_rule
        log_p, log_q, group = batch.get(OLD), batch.get("sampling_per_token_logps"), self._process_group
        if log_q is None and rule != "none":
            raise ValueError(
                f"off_policy_rule: got {rule!r}, and completions without the log-probabilities that they were sampled "
                "with; takes use_vllm, sampling_mask, or a rollout_func that returns them"
            )
        trusted = self._selection.trusted(log_p, log_q, batch["advantages"], mask=mask, process_group=group)
        if ratio is not None and self._tokens_are_independent(batch):  # TRL multiplies each token's loss by the ratio
            trusted = trusted.only(weighted(batch, trusted.mask))
        left = trusted.only(without_shared(batch, trusted.mask))
        if self._selection.cuts and PREFIX not in batch:
            self._cut_sequences(batch, left)
        if "d3s_entropy" not in batch:
            batch |= self._entropy_pass(batch)
        elif PREFIX in batch:
            batch[UNMEASURED] = mask & ~batch[PREFIX]
        # The entropy pass skips only rollouts whose tokens have scores that do not depend on entropies. These tokens
        # still count as valid tokens.
        candidates = self._prefixes(batch, left.mask) if PREFIX in batch else left
        entropy = batch.get("d3s_entropy", torch.zeros(mask.shape, device=mask.device))  # "prefix" reads none
        chosen = self._choose_tokens(entropy, batch["advantages"], candidates)
        batch["d3s_kept"], batch["d3s_threshold"] = chosen.mask, chosen.threshold
        weight = left.weight if chosen.weight is None else left.weight * chosen.weight
        batch["d3s_trusted"], batch["d3s_weight"] = trusted.mask, weight
        share = self._selection.token_share(self._progress)  # the update may be a later step's
        batch[ASKED] = torch.tensor(share, dtype=torch.float64)
        numbers = torch.stack([chosen.mask.sum(), left.mask.sum()])
        batch["d3s_tokens_kept"], batch["d3s_tokens_left"] = self.accelerator.gather(numbers).view(-1, 2).sum(dim=0)

    def _cut_sequences(self, batch: Batch, mask: Tensor | TrustedTokens) -> None:
        """Cuts sequences at random. Each row's cut depends on its random number alone, wherever the row is."""
        cut = self._selection.prefixes(mask, self._progress, draws=batch[DRAWS])
        batch[PREFIX], batch[PREFIX_WEIGHT] = cut.mask, cut.weight

    def _prefixes(self, batch: Batch, mask: Tensor) -> Prefixes:
        """Returns the prefixes of a batch whose sequences were cut, without the tokens outside of ``mask``."""
        prefix = batch[PREFIX] & mask
        return Prefixes(prefix, batch[PREFIX_WEIGHT], prefix.sum())

    def _entropy_pass(self, batch: Batch) -> Batch:
        """Makes an extra pass for the entropies. Returns the batch fields that it fills: entropies, log-probabilities,
        and a mask of the tokens whose entropies were not computed, because they are not needed. These are the tokens
        after a cut; all tokens if sequences are only cut, which takes no pass; and the tokens of a row with advantage
        0, except if tokens are ranked by entropy alone. Their values are 0.
        """
        mask = loss_mask(batch).bool()
        if self.args.token_rule == "prefix":
            return {UNMEASURED: mask}
        needed = batch.get(PREFIX, mask)
        useful = needed.any(dim=1)
        if self.args.token_rule not in ("entropy", "entropy_quantile"):
            useful &= batch["advantages"] != 0
        # Every process scores the same number of rows, since all processes take part in the forward of a sharded model.
        rows, found = int(self.accelerator.gather(useful.sum()).max()), torch.zeros(2, *mask.shape, device=mask.device)
        if rows > 0:
            first = useful.long().argsort(descending=True, stable=True)[:rows]
            logprob, entropy, _ = self._score(self.model, take(batch, first), compute_entropy=True)
            assert entropy is not None  # the entropies were requested
            # Some rows are scored only because all processes have to score the same number of rows. Their entropies
            # are not logged, since a single process would skip them.
            found = found.index_copy(1, first, torch.stack([logprob, entropy]))
        unmeasured = mask & ~(needed & useful.unsqueeze(1))
        return {LOGPROB: found[0], "d3s_entropy": found[1], UNMEASURED: unmeasured}

    def _choose_tokens(
        self, entropy: Tensor, advantages: Tensor, mask: Tensor | TrustedTokens | Prefixes
    ) -> TokenSelection:
        """Chooses this process's tokens: exactly the budget's share of the tokens of all processes, or of each row's
        tokens.
        """
        return self._selection.tokens(entropy, advantages, self._progress, mask=mask, process_group=self._process_group)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Returns TRL's mask in evaluation. In training, returns a mask of all tokens, since our choice of tokens is
        used instead of TRL's mask.
        """
        if self._loss_inputs is not None:
            return mask.bool()
        theirs: Tensor = super().get_high_entropy_mask(entropies, mask, threshold)
        return theirs

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        if not self.model.training:
            evaluated: Tensor = super()._compute_loss(model, inputs)
            return evaluated
        self._loss_inputs = inputs = dict(inputs)  # a copy: ESPO changes fields, and TRL may use the batch again
        ranges = self.epsilon_low, self.epsilon_high
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
            self.epsilon_low, self.epsilon_high = ranges
        # TRL's own code has already caused a host sync, so reading the number does not wait.
        self._count_tokens(self._just_counted.value())
        return loss

    def _score_for_loss(self, head: OurHead, call: Call, inputs: Batch) -> Scores:
        """Returns the scores for TRL's loss. Hooks on the scores let gradient flow only through the kept tokens."""
        measured = mask = loss_mask(inputs).bool()
        kept, weight = inputs.get("d3s_kept"), inputs.get("d3s_weight", 1)
        threshold: Any = inputs.get("d3s_threshold")
        needed = inputs.get(PREFIX) if kept is None else kept
        if needed is not None and self._tokens_are_independent(inputs):
            logprob, entropy, aux = self._score_kept(call, inputs, needed)
            if UNMEASURED in inputs or "d3s_entropy" not in inputs:
                measured = needed | (mask & ~inputs.get(UNMEASURED, mask))
        else:
            logprob, entropy, aux = call._replace(model=over_sets(call.model, inputs.get(SETS))).scores()
        assert entropy is not None  # TRL's loss always asks for the entropies
        constant = entropy.detach()
        if kept is None:
            inputs["d3s_trusted"] = weighted(inputs, mask) if self._tokens_are_independent(inputs) else mask
        left = without_shared(inputs, inputs["d3s_trusted"])
        if kept is None:
            candidates = self._prefixes(inputs, left) if PREFIX in inputs else left
            chosen = self._choose_tokens(constant, inputs["advantages"], candidates)
            kept, threshold = chosen.mask, chosen.threshold
            weight = 1 if chosen.weight is None else chosen.weight
        head.kept = HostNumber(kept.sum())
        totals, mean = self._log_tokens(kept, mask, constant, inputs, threshold, measured)
        unknown = mask & ~measured
        entropy = torch.where(unknown, mean, entropy)  # so TRL's mean over all tokens is the mean of known entropies
        if self._page is not None and self._page.add_trained(inputs, kept, constant.masked_fill(unknown, torch.nan)):
            page, self._page = self._page, None
            page.write(Path(self.args.output_dir, "selection"), self._tokenizer, self.accelerator.is_main_process)
        if self._espo:
            changed, epsilon = as_espo(inputs, logprob.detach(), constant, self.args, self._vocabulary)
            inputs |= changed
            self.epsilon_low = self.epsilon_high = epsilon
        if logprob.requires_grad:
            policy = bonus = torch.ones((), device=kept.device)
            if self.args.loss_denominator == "kept":
                if "d3s_tokens_kept" in inputs:
                    totals = torch.stack([inputs["d3s_tokens_kept"], inputs["d3s_tokens_left"]]).float()
                policy, bonus = gradient_weights(self.loss_type, kept, left, totals)
            select = only_through(kept, policy * weight)

            def hook(gradient: Tensor) -> Tensor:
                self._gradient_was_selected = True
                return select(gradient)

            logprob.register_hook(hook)  # type: ignore[no-untyped-call]
            if entropy.requires_grad:
                bonus = bonus * inputs.get(PREFIX_WEIGHT, 1)
                entropy.register_hook(only_through(kept, bonus))  # type: ignore[no-untyped-call]
        return logprob, entropy, aux

    def _score_kept(self, call: Call, inputs: Batch, kept: Tensor) -> Scores:
        """Scores only the ``kept`` tokens. The forward has only the rows with a kept token, up to the last column with
        one. All other tokens get the values of earlier passes. If no token is kept, the first row is still scored,
        because all processes must take part in the forward of a sharded model.
        """
        rows = kept.any(dim=1)
        rows[0] |= ~rows.any()
        place = rows.nonzero()[:, 0]
        prompt = call.tokens.shape[1] - call.columns
        used = int(self._columns_for(last_columns(kept), prompt, call.columns))
        needed, sets = kept[place, :used], inputs.get(SETS)
        model = over_sets(call.model, None if sets is None else sets[place, :used])

        def at_kept_tokens(labels: Tensor, **model_inputs: Any) -> Any:
            """Calls the model with labels only at the kept tokens, so that the head computes only these tokens."""
            labels = labels.clone()
            labels[:, prompt:].masked_fill_(~needed, -100)
            return model(labels=labels, **model_inputs)

        tokens, attention = (part[place, : prompt + used] for part in (call.tokens, call.attention))
        needed_alone = call._replace(model=at_kept_tokens, tokens=tokens, attention=attention, columns=used)
        logprob, entropy, aux = needed_alone.scores()
        assert entropy is not None
        # With these values, the ratio of a dropped token is 1. No pass has computed them if sequences are only cut.
        nothing = torch.zeros(kept.shape, device=kept.device)
        old = inputs[OLD] if OLD in inputs else inputs.get(LOGPROB, nothing)

        def of_all_tokens(scored: Tensor, earlier: Tensor) -> Tensor:
            earlier = torch.where(kept, 0.0, earlier).to(scored.dtype)
            return earlier.index_add(0, place, pad(scored, (0, call.columns - used)))

        return (
            of_all_tokens(logprob, old),
            of_all_tokens(entropy, inputs.get("d3s_entropy", nothing)),
            aux,
        )

    def _columns_for(self, last: Tensor, prompt: int, columns: int) -> Tensor:
        """Returns how many of the ``columns`` of completions are forwarded if each row needs those up to its ``last``.
        The forward has ``prompt`` more columns.
        """
        if not self._may_cut(prompt + columns).completions:
            return torch.full_like(last[0], columns)
        used, multiple = last.amax().clamp(min=1), self.pad_to_multiple_of or 1
        return ((prompt + used + multiple - 1) // multiple * multiple - prompt).clamp(max=columns)

    def _log_tokens(
        self, kept: Tensor, mask: Tensor, entropy: Tensor, inputs: Batch, threshold: Tensor, measured: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logs a micro-batch's token metrics. ``measured`` marks the tokens whose entropies are known, which include
        all kept tokens. Mean entropies are over these tokens. Returns two results over all processes: a tensor with the
        number of kept tokens and the number of tokens that were left to choose from, and the mean entropy.
        """
        trusted = inputs["d3s_trusted"]
        totals = self._sum_tokens(
            kept, mask, entropy, inputs["advantages"].unsqueeze(1), without_shared(inputs, trusted),
            weighted(inputs, trusted), measured,
        )  # fmt: skip
        number, number_all, _, number_measured, entropy_kept, entropy_dropped, number_left, *of_weights = totals
        asked = float(inputs[ASKED]) if ASKED in inputs else self._selection.token_share(self._progress)
        may_be_off_policy = self.args.off_policy_rule != "none" or RATIO in inputs
        metrics, weights = self._metrics_of(totals, threshold, asked, may_be_off_policy)
        rows = number.new_tensor(len(kept))
        of_ratios = number_all if self.importance_sampling_level == "token" or self._espo else rows
        weights |= {
            "entropy": number_measured, "kl": number_all, "cispo_clip_ratio": of_ratios, "vespo/phi_seq_mean": rows,
            **{f"clip_ratio/{part}_mean": of_ratios for part in ("low", "high", "region")},
        }  # fmt: skip
        self._log(metrics, weights)
        self._just_counted = HostNumber(torch.stack([number, number_all, *of_weights]))
        return torch.stack([number, number_left]).float(), (entropy_kept + entropy_dropped) / number_measured


def weighted(batch: Batch, mask: Tensor) -> Tensor:
    """Returns the tokens of ``mask`` whose loss TRL's correction of vLLM's probabilities does not multiply by 0."""
    return mask & (batch[RATIO] != 0) if RATIO in batch else mask


def without_shared(batch: Batch, mask: Tensor) -> Tensor:
    """Returns the tokens of ``mask`` without those that the option ``drop_shared_tokens`` leaves out."""
    return mask & ~batch[SHARED] if SHARED in batch else mask


def as_espo(batch: Batch, logprob: Tensor, entropy: Tensor, args: D3SConfig, vocab_size: int) -> tuple[Batch, Tensor]:
    """Returns the fields with which TRL's unchanged loss computes ESPO's objective, and an epsilon for each token.

    TRL's ratio is ``exp(logprob - old)``. With ``old = sg[logprob] - log ratio``, where sg stops the gradient, TRL's
    ratio equals ESPO's ratio in value and gradient. The only exception is the cap of e^10: there, ESPO's gradient is 0,
    but TRL's is not. The loss "grpo" averages over the tokens of each sequence; weights on the advantages turn this
    average into ESPO's mean over groups. In the other losses, all tokens that belong to a group have the same weight.

    ``logprob`` and ``entropy``, ``[B, T]``, are constants from the training forward. If the batch has no values of the
    old policy, these constants are used instead, since the policy has not changed yet.
    """
    old = batch.get(OLD, logprob)
    terms = espo_terms(
        logprob, old, batch.get("d3s_entropy", entropy), loss_mask(batch).bool(), quantiles=args.espo_quantiles,
        alpha=args.espo_alpha, denominator=args.espo_denominator, vocab_size=vocab_size,
    )  # fmt: skip
    weight = terms.weight if args.loss_type == "grpo" else (terms.weight > 0).float()
    changed = {OLD: logprob - terms.ratio.log(), "advantages": batch["advantages"].unsqueeze(1) * weight}
    if "sampling_per_token_logps" not in batch:  # otherwise TRL's off-policy mask would read the changed "old" values
        changed["sampling_per_token_logps"] = old
    return changed, terms.epsilon
