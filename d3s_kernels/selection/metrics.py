"""Metrics of a selection: what it kept and what it saves. Every trainer logs them under the same names."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments.checks import require_optional_tensors, require_tensors
from ..rollouts.select_rollouts import groups_without_spread
from ..tokens.select_tokens import TokenSelection
from .schedule import Budget

NAMES = {
    "d3s/rollouts_kept": "number of kept rollouts, which the update trains on",
    "d3s/rollout_share": "rollouts_kept / number of all rollouts",
    "d3s/rollout_share_asked": "the share of each group's rollouts that the budget asks for",
    "d3s/groups_without_spread": "share of the groups whose rewards are all equal, up to rounding",
    "d3s/groups_kept": "share of the groups that have a kept rollout",
    "d3s/tokens_not_forwarded": "number of tokens of dropped rollouts; the update does not forward them",
    "d3s/tokens_kept": "number of tokens with a gradient",
    "d3s/token_share": "tokens_kept / number of all tokens of the kept rollouts",
    "d3s/token_share_asked": "the share of the kept rollouts' tokens that the budget asks for",
    "d3s/threshold": "lowest score of a kept token; if tokens are chosen in each sequence, the mean of these",
    "d3s/entropy_kept": "mean entropy of the kept tokens, in nats",
    "d3s/entropy_dropped": "mean entropy of the dropped tokens in kept rollouts, in nats",
    "d3s/positive_advantage_share": "share of the kept tokens whose advantage is above 0",
    "d3s/head_rows_not_computed": "number of tokens of the kept rollouts that the LM head's backward leaves out",
    "d3s/flops_saved": "estimated share of the update's FLOPs that the selection saves",
}
"""Every metric and its meaning."""

OFF_POLICY_SHARE = "d3s/off_policy_share"
"""The name of one more metric: the share of the kept rollouts' tokens that are left out as off-policy, or whose loss a
trainer's own correction multiplies by 0. The metric is logged if an ``off_policy_rule`` or such a correction is in use.
"""

SHARED_SHARE = "d3s/shared_share"
"""The name of one more metric: the share of the kept rollouts' tokens that ``drop_shared_tokens`` leaves out. It is
logged if this option is on.
"""

ASYNC_NAMES = {
    "d3s/reward": "mean reward of all rollouts of the window, kept or dropped",
    "d3s/partial_groups_total": "number of groups whose rollouts were chosen before all of them had come",
    "d3s/late_samples_total": "number of samples that came after their rollout was kept or dropped",
    "d3s/dropped_not_finite_total": "number of rollouts that were dropped because their advantage was not finite",
}
"""Every metric of the window that asynchronous training chooses rollouts from, and its meaning."""
REWARD, PARTIAL_GROUPS, LATE_SAMPLES, NOT_FINITE = ASYNC_NAMES

LARGEST = "d3s/largest_micro_batch"  # the log of several updates has the largest value, not the mean
PADDING_NAMES = {
    "d3s/padding": "share of the forwarded positions that are padding",
    "d3s/padding_before": "the same share if all kept rollouts were as wide as the longest prompt and completion",
    LARGEST: "number of positions of the largest micro-batch of any process, padding included",
}
"""Every metric of the update's micro-batches, and its meaning. Logged by trainers whose micro-batches we cut."""

SAMPLING_NAMES = {
    "d3s/set_size_mean": "mean number of ids in a token's support",
    "d3s/set_size_p99": "99th percentile of the number of ids in a token's support",
    "d3s/set_singletons": "share of the tokens whose support has only one id",
    "d3s/set_mass": "mean probability of a token's support before other ids were left out; NaN if not recorded",
    "d3s/set_head_flops_saved": "share of the LM head's FLOPs that supports save: 1 - computed columns / all columns",
}
"""Every metric of the supports of a sampling mask, and its meaning."""


def rollout_metrics(
    kept: Tensor, lengths: Tensor, without_spread: Tensor, groups_kept: Tensor, asked: float
) -> dict[str, Tensor]:
    """Returns the metrics of the chosen rollouts.

    Args:
        kept: bool ``[N]``: for each rollout of the batch, whether it is kept.
        lengths: ``[N]``, for each rollout the number of its tokens that are in the loss.
        without_spread: bool ``[groups]``, from :func:`groups_without_spread`.
        groups_kept: bool ``[groups]``: whether the group has a kept rollout.
        asked: the share of the rollouts that the budget asks for.
    """
    number = kept.sum().double()
    return {
        "d3s/rollouts_kept": number,
        "d3s/rollout_share": number / kept.numel(),
        "d3s/rollout_share_asked": torch.full_like(number, asked),
        "d3s/groups_without_spread": without_spread.double().mean(),
        "d3s/groups_kept": groups_kept.double().mean(),
        "d3s/tokens_not_forwarded": lengths.masked_fill(kept, 0).double().sum(),
    }


def token_sums(
    kept: Tensor, mask: Tensor, entropy: Tensor, advantages: Tensor, measured: Tensor | None = None
) -> Tensor:
    """Returns the sums that :func:`token_metrics` takes. The sums of several micro-batches or processes may be added.

    Args:
        kept, mask: bool, the shape of ``entropy``: the kept tokens, and all tokens of the kept rollouts.
        entropy: nats.
        advantages: broadcasts to the shape of ``entropy``.
        measured: bool, the shape of ``entropy``: the tokens of ``mask`` whose entropy was computed. They must include
            all kept tokens. The default is all tokens of ``mask``.

    Returns:
        float64 ``[6]``: four numbers of tokens, and two sums of entropies. The numbers are of the kept tokens, of all
        tokens, of the kept tokens with a positive advantage, and of the tokens whose entropy was computed. The sums are
        over the kept tokens, and over the dropped tokens whose entropy was computed.
    """
    measured = mask if measured is None else measured
    entropies = [torch.where(tokens, entropy, 0.0) for tokens in (kept, measured & ~kept)]
    parts = [kept, mask, kept & (advantages > 0), measured, *entropies]
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def token_metrics(sums: Tensor, threshold: Tensor, asked: float) -> dict[str, Tensor]:
    """Returns the metrics of the chosen tokens, from the sums of :func:`token_sums`. A mean over no tokens is NaN.

    Args:
        threshold: from :class:`d3s_kernels.TokenSelection`.
        asked: the share of the tokens that the budget asks for.
    """
    kept, everything, positive, measured, entropy_kept, entropy_dropped = sums
    return {
        "d3s/tokens_kept": kept,
        "d3s/token_share": kept / everything,
        "d3s/token_share_asked": torch.full_like(kept, asked),
        "d3s/threshold": threshold.double().masked_fill(~threshold.isfinite(), torch.nan).nanmean(),
        "d3s/entropy_kept": entropy_kept / kept,
        "d3s/entropy_dropped": entropy_dropped / (measured - kept),
        "d3s/positive_advantage_share": positive / kept,
        "d3s/head_rows_not_computed": everything - kept,
    }


def token_weights(sums: Tensor, threshold: Tensor) -> dict[str, Tensor]:
    """Returns, for those of :func:`token_metrics` that are means, of how many values. Micro-batches differ in these
    numbers, so a log of several of them needs weights.
    """
    kept, everything, _, measured, _, _ = sums
    return {
        "d3s/token_share": everything,
        "d3s/threshold": threshold.isfinite().sum(),
        "d3s/entropy_kept": kept,
        "d3s/entropy_dropped": measured - kept,
        "d3s/positive_advantage_share": kept,
    }


def selection_metrics(
    *,
    advantages: Tensor,
    rollout_mask: Tensor,
    tokens: TokenSelection,
    token_mask: Tensor,
    head_share: float | None = None,
    rewards: Tensor | None = None,
    budget: Budget | None = None,
) -> dict[str, Tensor]:
    """Returns the metrics of one step's selection, for a training loop of your own. Our trainers log the same metrics.

    :data:`NAMES` explains each metric. All metrics cover only this process's rollouts.

    ``d3s/flops_saved`` counts matrix products. The unit is the cost of one forward of all rollouts' tokens. The LM
    head's share of this cost is ``h`` (``head_share``). The body's backward costs twice as much as the body's forward.
    If the head's backward recomputes the logits, the head's forward and backward together cost four times as much as
    the forward alone. Let ``f`` be the share of all tokens that is forwarded, and ``k`` the share that is kept::

        before = 3 (1 - h) + 4 h
        after  = 3 (1 - h) f + h (f + 3 k)      # the head of d3s_kernels: its backward covers kept tokens only
        saved  = 1 - after / before

    Attention, gradient checkpointing, generation and the passes for old and reference log-probabilities are not
    counted.

    Args:
        advantages: float ``[groups, n]``, of all rollouts.
        rollout_mask: bool ``[groups, n]``, the kept rollouts.
        tokens: the selection from the kept rollouts' tokens. Its ``mask`` and ``entropy`` are ``[kept rollouts, T]``,
            in the order of the rollouts; or ``[groups * n, T]``, with no kept token in dropped rollouts.
        token_mask: bool ``[groups * n, T]``, a row for each rollout, kept or dropped: True at the tokens in the loss.
        head_share: the LM head's share of the weights in matrix products, in [0, 1]: 0.28 for Qwen2.5-0.5B, 0.077 for
            Qwen2.5-7B. Without it there is no ``d3s/flops_saved``.
        rewards: ``[groups, n]``, used to count groups without a spread. Without ``rewards``, the advantages are used.
            The count may then be too low: in a group of equal rewards, enlarged rounding errors may make the advantages
            differ from each other.
        budget: the budget of the selection. Without it there is no ``d3s/rollout_share_asked`` and no
            ``d3s/token_share_asked``.

    Returns:
        The metrics by name: 0-d float64 tensors on the device of the masks. No host sync. A mean over no tokens is NaN.

    Raises:
        ValueError: a mask of another shape; a head_share outside [0, 1].

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> from d3s_kernels.selection.metrics import selection_metrics
        >>> rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
        >>> advantages, budget = d3s.group_advantages(rewards), d3s.Budget(rollouts=2, token_ratio=0.25)
        >>> kept, mask = d3s.select_rollouts(advantages, budget.rollouts), torch.ones(8, 6, dtype=torch.bool)
        >>> entropy = torch.rand(4, 6)  # of the kept rollouts
        >>> tokens = d3s.select_tokens(entropy, advantages[kept], budget.token_ratio, mask=mask[kept.flatten()])
        >>> metrics = selection_metrics(advantages=advantages, rollout_mask=kept, tokens=tokens, token_mask=mask,
        ...                             head_share=0.28, rewards=rewards, budget=budget)
        >>> names = "d3s/tokens_kept", "d3s/groups_without_spread", "d3s/flops_saved"
        >>> [round(float(metrics[name]), 3) for name in names]
        [6.0, 0.5, 0.596]
    """
    require_tensors(advantages=advantages, rollout_mask=rollout_mask, token_mask=token_mask)
    require_optional_tensors(advantages, rewards=rewards)
    if advantages.dim() != 2:
        raise ValueError(f"advantages: got shape {list(advantages.shape)}; takes [groups, n]")
    groups, n = advantages.shape
    for name, value in {"rollout_mask": rollout_mask, "rewards": rewards}.items():
        if value is not None and value.shape != advantages.shape:
            raise ValueError(f"{name}: got shape {list(value.shape)}; takes that of advantages, {[groups, n]}")
    rollouts = groups * n
    if token_mask.dim() != 2 or len(token_mask) != rollouts:
        raise ValueError(f"token_mask: got shape {list(token_mask.shape)}; takes [{rollouts}, T], all rollouts")
    width = token_mask.shape[1]
    if tokens.mask.dim() != 2 or tokens.mask.shape[1] != width or len(tokens.mask) > rollouts:
        raise ValueError(
            f"tokens: got a mask of shape {list(tokens.mask.shape)}; takes [kept rollouts, {width}] or "
            f"[{rollouts}, {width}]"
        )
    if head_share is not None and not 0 <= head_share <= 1:
        raise ValueError(f"head_share: got {head_share}; takes a number in [0, 1]")

    kept, advantage = rollout_mask.flatten(), advantages.flatten()
    mask = token_mask & kept.unsqueeze(1)
    if len(tokens.mask) != rollouts:
        rows = (~kept).to(torch.int8).argsort(stable=True)[: len(tokens.mask)]  # indices of the kept rollouts, in order
        mask, advantage = mask[rows], advantage[rows]
    without_spread = groups_without_spread(advantages if rewards is None else rewards)
    sums = token_sums(tokens.mask, mask, tokens.entropy.detach(), advantage.unsqueeze(1))
    asked = (0.0, 0.0) if budget is None else (budget.rollouts / n, budget.token_ratio)
    metrics = rollout_metrics(kept, token_mask.sum(dim=1), without_spread, rollout_mask.any(dim=1), asked[0])
    metrics |= token_metrics(sums, tokens.threshold, asked[1])
    if budget is None:
        del metrics["d3s/rollout_share_asked"], metrics["d3s/token_share_asked"]
    if head_share is not None:
        everything, h = token_mask.sum(dtype=torch.float64), head_share
        f, k = sums[1] / everything, sums[0] / everything
        after = 3 * (1 - h) * f + h * (f + 3 * k)
        metrics["d3s/flops_saved"] = 1 - after / (3 * (1 - h) + 4 * h)
    return metrics


def padding_metrics(sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
    """Returns the metrics of an update's micro-batches, from their sums over all processes.

    Args:
        sums: integers ``[4]``: the number of tokens, and of positions with padding, before rows were cut; then both
            numbers for what is forwarded.
        largest: 0-d, the number of positions of the largest micro-batch.
    """
    tokens_before, before, tokens, after = sums.double()
    return {
        "d3s/padding": 1 - tokens / after,
        "d3s/padding_before": 1 - tokens_before / before,
        LARGEST: largest.double(),
    }


def set_sums(sizes: Tensor, mask: Tensor, most: int, log_mass: Tensor | None = None) -> Tensor:
    """Returns the sums that :func:`set_metrics` takes. The sums of several processes may be added.

    Args:
        sizes: integers of any shape: the size of each token's set, at most ``most``.
        mask: bool, the same shape: the tokens to count.
        log_mass: float, the same shape: each set's log-probability. None if it was not recorded.

    Returns:
        float64 ``[most + 2]``: for each size from 0 to ``most``, the number of tokens whose set has this size; then the
        sum of the sets' probabilities. No host sync.
    """
    weights = mask.flatten().double()
    counts = weights.new_zeros(most + 1).index_add(0, sizes.flatten(), weights)
    mass = counts.new_full((), torch.nan)
    if log_mass is not None:
        mass = torch.where(mask, log_mass.double().exp(), 0.0).sum()
    return torch.cat([counts, mass.view(1)])


def set_metrics(sums: Tensor, vocabulary: int | None = None) -> dict[str, Tensor]:
    """Returns the metrics of the supports, from the sums of :func:`set_sums`. A mean over no tokens is NaN. If the
    probabilities of the supports were not recorded, their mean is NaN too.

    For each token, a head that is called with a sampling mask computes only the columns of the token's support, in the
    forward and in the backward; if the support has one id, the head computes no column. Without a sampling mask, the
    head would compute ``vocabulary`` columns. If your head is called without a sampling mask, pass no ``vocabulary``:
    the metric of the saved FLOPs is then left out.
    """
    counts, mass = sums[:-1], sums[-1]
    sizes, tokens = torch.arange(len(counts), device=counts.device), counts.sum()
    columns = (sizes * counts).sum()
    below_p99 = counts.cumsum(0) < 0.99 * tokens  # for each size: do fewer than 99 % of the sets have it or less?
    metrics = {
        "d3s/set_size_mean": columns / tokens,
        "d3s/set_size_p99": torch.where(tokens > 0, below_p99.sum().double(), torch.nan),
        "d3s/set_singletons": counts[1] / tokens,
        "d3s/set_mass": mass / tokens,
    }
    if vocabulary is not None:
        metrics["d3s/set_head_flops_saved"] = 1 - (columns - counts[1]) / (vocabulary * tokens)
    return metrics
