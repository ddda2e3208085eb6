"""One policy-gradient step on a batch of rollouts: in plain PyTorch, and with d3s_kernels.

Both forward only the kept rollouts, and share the loss and the model's body. The step is on-policy, so GRPO's ratio is
1 and its gradient is that of -A * logprob. Measured are the selection and the LM head, from the hidden states to the
gradients of its weight and of the hidden states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _cost import Costs
from _task import Rollouts
from torch import Tensor
from transformers import Qwen2ForCausalLM

import d3s_kernels as d3s

CHOOSE_ROLLOUTS, CHOOSE_TOKENS, LM_HEAD = "choose rollouts", "choose tokens", "LM head"
SELECTION = CHOOSE_ROLLOUTS, CHOOSE_TOKENS


@dataclass
class Step:
    """The choice and the results of a step."""

    rollouts: Tensor  # bool [B]
    tokens: Tensor  # bool [B, T]
    loss: float
    gradients: list[Tensor]  # of the model's parameters, in their order
    costs: Costs


def d3s_step(model: Qwen2ForCausalLM, batch: Rollouts, budget: d3s.Budget) -> Step:
    costs = Costs()
    with costs.of(CHOOSE_ROLLOUTS):
        rollouts = d3s.select_rollouts(batch.grouped(batch.advantages), budget.rollouts, scope="batch").flatten()
    kept = batch[rollouts]
    hidden = completion_hidden(model, kept)
    head_input = hidden.detach().requires_grad_()  # cuts the graph, so that the head is measured alone

    with costs.of(LM_HEAD):
        logprob, entropy = d3s.linear_logprob_entropy(head_input, model.lm_head.weight, kept.labels, mask=kept.mask)
    with costs.of(CHOOSE_TOKENS):
        chosen = d3s.select_tokens(entropy.detach(), kept.advantages, budget.token_ratio, mask=kept.mask, scope="batch")
    with costs.of(LM_HEAD):
        # Detaching makes the gradient of a dropped token exactly 0, even if a trainer's loss has more terms (such as
        # KL), and the head's backward skips it.
        logprob = torch.where(chosen.mask, logprob, logprob.detach())
        loss = policy_loss(logprob, kept.advantages[:, None], chosen.mask)
        loss.backward()
    hidden.backward(head_input.grad)
    tokens = torch.zeros_like(batch.mask).masked_scatter_(rollouts[:, None], chosen.mask)
    return Step(rollouts, tokens, loss.item(), taken_gradients(model), costs)


def plain_step(
    model: Qwen2ForCausalLM, batch: Rollouts, budget: d3s.Budget | None = None, train_on: Step | None = None
) -> Step:
    """The step in plain PyTorch, as trainers do it today; without a budget it keeps everything.

    Padding does not enter its LM head, as in the best trainers, so that padding makes no difference in the comparison.
    It chooses its own rollouts and tokens, but then trains on those of `train_on`. Rollouts of one prompt begin alike,
    so many scores are equal except for rounding, and losses can be compared only on the same tokens.
    """
    costs = Costs()
    rollouts = torch.ones(len(batch), dtype=torch.bool)
    if budget is not None:
        with costs.of(CHOOSE_ROLLOUTS):
            rollouts = plain_max_variance(batch.advantages, budget.rollouts * len(batch.questions))
    trained = rollouts if train_on is None else train_on.rollouts
    kept = batch[trained]
    hidden = completion_hidden(model, kept)
    head_input = hidden.detach().requires_grad_()
    advantages = kept.advantages[:, None].expand_as(kept.mask)[kept.mask]

    with costs.of(LM_HEAD):
        logprobs = F.linear(head_input[kept.mask], model.lm_head.weight).float().log_softmax(-1)
        logprob = logprobs.gather(-1, kept.labels[kept.mask][:, None])[:, 0]
    chosen = torch.ones_like(advantages, dtype=torch.bool)
    if budget is not None:
        with costs.of(CHOOSE_TOKENS), torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            chosen = plain_top_share(advantages.abs() * entropy, budget.token_ratio)
    with costs.of(LM_HEAD):
        mask = chosen if train_on is None else train_on.tokens[trained][kept.mask]
        loss = policy_loss(logprob, advantages, mask)
        loss.backward()
    hidden.backward(head_input.grad)
    tokens = torch.zeros_like(batch.mask).masked_scatter_(batch.mask & trained[:, None], chosen)
    return Step(rollouts, tokens, loss.item(), taken_gradients(model), costs)


def completion_hidden(model: Qwen2ForCausalLM, batch: Rollouts) -> Tensor:
    """The output of the model's body, [B, T, hidden], at the positions that predict the completions' tokens."""
    hidden: Tensor = model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
    return hidden[:, -batch.labels.shape[1] :]


def policy_loss(logprob: Tensor, advantages: Tensor, tokens: Tensor) -> Tensor:
    """Mean of -A * logprob over the kept tokens."""
    return -(advantages * logprob * tokens).sum() / tokens.sum()


def plain_max_variance(values: Tensor, keep: int) -> Tensor:
    """A subset of `keep` values with the largest variance: the lowest and the highest ones at the best split (PODS)."""
    order = values.argsort(stable=True)
    best, largest = order[:keep], -1.0
    for low in range(keep + 1):
        subset = torch.cat([order[:low], order[len(order) - keep + low :]])
        variance = values[subset].double().var().item()
        if variance >= largest * (1 - 1e-12):  # on ties the fewest from the top, like d3s_kernels
            best, largest = subset, variance
    return torch.zeros_like(values, dtype=torch.bool).index_fill_(0, best, True)


def plain_top_share(scores: Tensor, ratio: float) -> Tensor:
    best = scores.topk(max(1, math.ceil(ratio * len(scores)))).indices
    return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, best, True)


def taken_gradients(model: Qwen2ForCausalLM) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The relative error, in norm, between two gradients of the whole model."""
    difference = math.hypot(*(float(torch.dist(a, b)) for a, b in zip(ours, theirs, strict=True)))
    return difference / math.hypot(*(float(b.norm()) for b in theirs))
