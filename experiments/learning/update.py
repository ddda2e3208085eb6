"""One update: advantages, the choice of rollouts and tokens, the loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

import d3s_kernels as d3s
from d3s_kernels.off_policy.trusted_tokens import TrustRule

from .arms import ALL_TOKENS, Arm
from .generate import Rollouts
from .ledger import Counts

CHUNK = 32  # rollouts in one forward
EPSILON = 0.2  # of PPO's clipping

Choice = Callable[[Tensor, Tensor], Tensor]  # of entropies and advantages of tokens: a mask of those to keep

Trust = Callable[[Tensor, "Tokens"], tuple[Tensor, Tensor]]  # of log p: a mask of tokens, and weights


class Update(NamedTuple):
    counts: Counts
    positive: int = 0  # tokens in the loss whose advantage is above 0


def add_gradient(
    model: PreTrainedModel,
    rollouts: Rollouts,
    rewards: Tensor,
    arm: Arm,
    budget: d3s.Budget,
    random: torch.Generator,
    micro_batch: int | None = None,
) -> Update:
    """Adds the gradient of the arm's loss to the model's: the mean of -A log p over the kept tokens of the step. With
    prefixes, it is a weighted sum over the kept tokens, divided by the number of all tokens.

    Without staleness, the batch was sampled from this model, so that every importance ratio is 1 and nothing is
    clipped. With it, the gradients of the tokens have the weights of ``trusted``.

    Args:
        rewards: [prompts, rollouts of a prompt], in the order of the rollouts.
        micro_batch: rollouts whose tokens are chosen together, and of which all activations are held at once. None:
            all that are kept.
    """
    rollouts, advantages = kept_rollouts(rollouts, rewards.to(rollouts.prompt.device), arm, budget, random)
    choose, number = None, 0
    if arm.token_rule == "prefix":  # what is after a cut is not even forwarded
        cut = d3s.random_prefixes(rollouts.completion_mask, budget.token_ratio, generator=random)
        number = int(rollouts.completion_mask.sum())
        rollouts = rollouts._replace(completion_mask=cut.mask)
        advantages = advantages.unsqueeze(1) * cut.weight
    elif budget.token_ratio != ALL_TOKENS:
        choose = choice(arm, budget, random)
    trust = partial(trusted, arm.trust_rule) if arm.staleness else None
    update = add_sum(model, rollouts, advantages, choose, micro_batch, trust)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= max(1, number or update.counts.kept)
    return update


def kept_rollouts(
    rollouts: Rollouts, rewards: Tensor, arm: Arm, budget: d3s.Budget, random: torch.Generator
) -> tuple[Rollouts, Tensor]:
    """The rollouts to train on, and their advantages."""
    advantages = d3s.group_advantages(rewards)
    if arm.rollout_rule is None:
        return rollouts, advantages.flatten()
    kept = d3s.select_rollouts(
        advantages,
        budget.rollouts,
        rule=arm.rollout_rule,
        scope="batch" if arm.pooled else "group",
        generator=random if arm.rollout_rule == "random" else None,
    )
    if not arm.pooled:  # as in PODS: the advantages among those that are kept
        own = d3s.group_advantages(rewards[kept].view(len(rewards), budget.rollouts)).flatten()
    else:
        own = advantages[kept]
    return rollouts.rows(kept.flatten().nonzero().squeeze(1)), own


def choice(arm: Arm, budget: d3s.Budget, random: torch.Generator) -> Choice:
    drawing = random if arm.token_rule == "random" else None

    def choose(entropy: Tensor, advantages: Tensor) -> Tensor:
        share = budget.token_ratio
        return d3s.select_tokens(entropy, advantages, share, rule=arm.token_rule, generator=drawing).mask

    return choose


def trusted(rule: TrustRule | None, logprob: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The tokens that count, and the weights of the gradients of their log p, without the advantages.

    Without a rule, PPO's clipping, as in TRL's AsyncGRPOTrainer: the gradient of -min(r A, clip(r) A) is -r A times
    that of log p, or 0 where r has left [1 - epsilon, 1 + epsilon] in the direction of A. All tokens are in the mean.
    """
    if rule is not None:
        own = d3s.trusted_tokens(logprob, tokens.sampled, rule)
        return own.mask, own.weight
    ratio = (logprob - tokens.sampled).exp()
    bound = torch.where(tokens.advantages > 0, ratio <= 1 + EPSILON, ratio >= 1 - EPSILON)
    return torch.ones_like(bound), ratio * bound


def add_sum(
    model: PreTrainedModel,
    rollouts: Rollouts,
    advantages: Tensor,
    choose: Choice | None = None,
    micro_batch: int | None = None,
    trust: Trust | None = None,
) -> Update:
    """Adds the gradient of the sum of -A log p over the tokens, or over those that are chosen. ``advantages`` are those
    of the rollouts, or of their tokens. ``trust`` leaves out more tokens and gives the others weights.
    """
    by_length = rollouts.lengths().argsort(stable=True)  # so that little of a chunk is padding
    size = min(CHUNK, micro_batch or CHUNK) if choose is None else micro_batch or len(by_length)
    done, positive = Counts(updated=int(rollouts.lengths().sum()), steps=1), 0
    for rows in by_length.split(size):
        tokens = forward(model, rollouts, advantages, rows)
        logprob, entropy = d3s.linear_logprob_entropy(tokens.hidden, labels=tokens.labels, **d3s.lm_head(model))
        if choose is None:
            mask = torch.ones_like(tokens.labels, dtype=torch.bool)
        else:
            mask = choose(entropy.detach(), tokens.advantages)
            done += Counts(scored=len(mask))
        of_token = tokens.advantages
        if trust is not None:
            counts, weight = trust(logprob.detach(), tokens)
            mask, of_token = mask & counts, of_token * weight
        (-(logprob * of_token)[mask].sum()).backward()
        done += Counts(kept=int(mask.sum()))
        positive += int((mask & (tokens.advantages > 0)).sum())
    return Update(done, positive)


class Tokens(NamedTuple):
    """The tokens of completions, one after the other."""

    hidden: Tensor  # [tokens, width]: the states that they are predicted from
    labels: Tensor  # int64 [tokens]
    advantages: Tensor  # float32 [tokens]
    sampled: Tensor  # float32 [tokens]: their log-probabilities when they were sampled


def forward(model: PreTrainedModel, rollouts: Rollouts, advantages: Tensor, rows: Tensor) -> Tokens:
    """The body's forward over these rollouts, in chunks."""
    parts = []
    for chunk in rows.split(CHUNK):
        own = rollouts.rows(chunk)
        mask = torch.cat([own.prompt_mask, own.completion_mask], 1)
        hidden = model.base_model(
            input_ids=torch.cat([own.prompt, own.completion], 1),
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        predicting = hidden[:, own.prompt.shape[1] - 1 : -1]
        columns, of_token = own.completion.shape[1], advantages[chunk]
        if of_token.dim() == 1:
            of_token = of_token.unsqueeze(1).expand(-1, columns)
        of_token = of_token[:, :columns]  # what was cut off is at the end
        parts.append([tensor[own.completion_mask] for tensor in (predicting, own.completion, of_token, own.logprob)])
    return Tokens(*(torch.cat(part) for part in zip(*parts, strict=True)))
