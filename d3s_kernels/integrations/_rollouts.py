"""Which rollouts of a generation batch are kept, by their advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from .._across_ranks.equal_rows import most_varied
from ..rollouts import RolloutRule, group_advantages, groups_without_spread, select_rollouts
from ..tokens import topk_mask


def rows_to_keep(groups: int, n: int, keep: int, multiple: int) -> tuple[int, int]:
    """The number of rollouts a budget asks for, with ``keep`` clamped to [2, n]; and it rounded up to ``multiple``."""
    asked = min(max(keep, 2), n) * groups
    return asked, min(groups * n, -(-asked // multiple) * multiple)


def total_rewards(of_each_function: Tensor, weights: Tensor) -> Tensor:
    """``[rollouts, functions]``, NaN where a function gave no reward, to the weighted sum; NaN where none gave one."""
    total = (of_each_function * weights.to(of_each_function.device)).nansum(dim=1)
    return total.masked_fill(of_each_function.isnan().all(dim=1), torch.nan)


def without_spread(of_each_function: Tensor, weights: Tensor, n: int, separately: bool) -> Tensor:
    """Marks the groups of ``n`` rollouts whose rewards are all equal: bool ``[groups]``. Where advantages are made of
    each function's rewards ``separately``, each of them has to be, since each teaches something.
    """
    if separately:
        return groups_without_spread(of_each_function.view(-1, n, of_each_function.shape[1]).transpose(1, 2)).all(dim=1)
    return groups_without_spread(total_rewards(of_each_function, weights).view(-1, n))


def of_survivors(advantages: Tensor, kept: Tensor, scale_rewards: str, same: Tensor) -> Tensor:
    """The advantages ``[groups, n]``, normalised anew over the kept rollouts of each group (PODS). ``same``, bool
    ``[groups]``, marks those without a spread: their advantages are rounding errors, which a division would enlarge.
    """
    survivors = advantages.masked_fill(same[:, None], 0).masked_fill(~kept, torch.nan)  # NaN is ignored
    # With scale_rewards="batch" the trainer has already divided by the standard deviation of the batch.
    return group_advantages(survivors, scale="group" if scale_rewards == "group" else "none")


def ranked_by(advantages: Tensor, has_tokens: Tensor, rule: str) -> Tensor:
    """What rollouts are ranked by: their advantages. A rollout without a token in the loss (truncated, with
    mask_truncated_completions) teaches nothing: it counts as one whose advantage is 0, or for "highest" as the lowest.
    """
    if rule == "highest":
        return torch.where(has_tokens, advantages, advantages.amin() - 1)
    return torch.where(has_tokens, advantages, 0.0)


def choose_rollouts(
    advantages: Tensor,
    keep: int,
    scope: str,
    multiple: int,
    *,
    rule: RolloutRule = "max_variance",
    ranks: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Marks ``keep`` rollouts for each group, and more until their number is a multiple of ``multiple``.

    Args:
        advantages: ``[groups, n]``.
        keep: clamped to [2, n].
        scope: "batch" pools all groups. "group" keeps the same number of each group; if ``multiple`` requires more, the
            groups with the largest variance keep one more.
        multiple: divides ``groups * n``.
        rule: a rule of :func:`d3s_kernels.select_rollouts`.
        ranks: if given, each rank keeps the same number of rollouts, so that no rollout has to move between ranks.
            With scope "group", if no group lies on two ranks, each rank chooses from its own groups. Otherwise, for
            the rule "max_variance", the choice is the one with the largest variance over all ranks that was found
            under this restriction; for other rules each rank chooses from its own rollouts.
        generator: for the rule "random": in the same state on every rank.

    Returns:
        bool ``[groups * n]``.
    """
    groups, n = advantages.shape
    _, total = rows_to_keep(groups, n, keep, multiple)

    def chosen(values: Tensor, number: int) -> Tensor:
        return select_rollouts(values, number, rule=rule, scope="group", generator=generator)

    if ranks is not None and scope == "group" and groups % ranks == 0:
        of_each = [
            choose_rollouts(own, keep, scope, multiple // ranks, rule=rule, generator=generator)
            for own in advantages.chunk(ranks)
        ]
        return torch.cat(of_each)
    if ranks is not None:
        of_ranks = advantages.reshape(ranks, -1)
        if rule != "max_variance":
            return chosen(of_ranks, total // ranks).flatten()
        return most_varied(of_ranks, torch.full((), total, device=advantages.device)).flatten()
    if scope == "batch":
        return chosen(advantages.flatten(), total)
    each, more = divmod(total, groups)
    kept = chosen(advantages, each)
    if more:
        widest = topk_mask(advantages.var(dim=1), k=more)
        kept = torch.where(widest[:, None], chosen(advantages, each + 1), kept)
    return kept.flatten()
