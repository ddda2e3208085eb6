"""Chooses how many rollouts are kept, so that a trainer can divide them evenly, and which rollouts are kept."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from .._arguments.checks import integers_as_float32, is_known, require_scope, require_tensors, whole_number
from .._rules.equal_rows import most_varied
from .._rules.groups import in_groups
from ..rollouts.select_rollouts import RolloutRule, Scope, select_rollouts
from ..tokens.select_tokens import topk_mask


def choose_rollouts(
    advantages: Tensor,
    keep: int,
    *,
    rule: RolloutRule = "max_variance",
    scope: Scope = "batch",
    groups: Iterable[Hashable] | Tensor | None = None,
    multiple_of: int = 1,
    ranks: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Marks ``keep`` rollouts for each group, and further rollouts until the total is a multiple of ``multiple_of``.

    The total is the number of rollouts that all groups keep together. With scope "batch", they are chosen from the pool
    of all groups. With scope "group", all groups keep the same number of rollouts, the largest number that does not
    exceed the total. (A group with fewer rollouts keeps all of them.) If the total is not reached yet, some groups keep
    one rollout more. These are the groups whose kept rollouts then have the largest variance, because D3S and PODS
    maximise the variance. With the rule "random", these groups are drawn at random. Variances that differ only by
    rounding tie, and ties go to the earlier group.

    Args:
        advantages: as in :func:`d3s_kernels.select_rollouts`, ``[groups, n]``; or ``[N]`` with ``groups``. Non-finite
            advantages are never kept. On a GPU without ``groups``, the host does not count the finite advantages, so
            the number of kept rollouts is right only if all advantages are finite. With ``groups``, the host counts
            them.
        keep: at least 1. Groups with fewer rollouts keep all of them.
        rule, scope: as in :func:`d3s_kernels.select_rollouts`.
        groups, multiple_of: as in :meth:`d3s_kernels.Selection.rollouts`.
        ranks: the number of ranks, if each rank has an equal part of the rollouts and must keep the same number of
            them, so that no rollout has to move to another rank. With scope "group", if no group lies on two ranks,
            each rank chooses from its own groups. In all other cases, the rule "max_variance" nearly maximises the
            variance over all ranks under this restriction; with any other rule, each rank chooses from its own
            rollouts.
        generator: for the rule "random".

    Returns:
        bool, the shape of ``advantages``.

    Raises:
        ValueError: fewer rollouts with a finite advantage than ``multiple_of``; a wrong shape; as
            :func:`d3s_kernels.select_rollouts`.

    Example:
        >>> import torch
        >>> from d3s_kernels.selection import choose_rollouts
        >>> advantages = torch.tensor([0.3, 1.5, -0.9, 0.0, -1.5, 0.6])
        >>> choose_rollouts(advantages, 2, scope="group", groups="abaabb")
        tensor([ True,  True,  True, False,  True, False])
        >>> choose_rollouts(advantages, 2, scope="group", groups="abaabb", multiple_of=5)
        tensor([ True,  True,  True, False,  True,  True])
    """
    require_scope(scope, "group")
    require_tensors(advantages=advantages)
    advantages = integers_as_float32("advantages", advantages)  # NaN pads groups
    keep, multiple_of = whole_number("keep", keep, at_least=1), whole_number("multiple_of", multiple_of, at_least=1)
    if groups is not None:
        table, places = in_groups(advantages, groups)
    elif advantages.dim() == 2:
        table = advantages
    else:
        raise ValueError(f"advantages: got shape {list(advantages.shape)}; takes [groups, n], or [N] with groups")
    if ranks is not None:
        if groups is not None or ranks < 1 or advantages.numel() % ranks:
            takes = "takes [groups, n] without groups, whose rollouts can be divided evenly among the ranks"
            raise ValueError(f"ranks: got {ranks} with advantages of shape {list(advantages.shape)}; {takes}")
        multiple_of = math.lcm(multiple_of, ranks)
    if groups is not None or is_known(advantages):
        sizes = table.isfinite().sum(dim=1).tolist()
    else:
        sizes = [table.shape[1]] * len(table)  # counting on a GPU would cause a host sync

    def number_kept(sizes: list[int], multiple: int) -> int:
        asked = sum(min(keep, size) for size in sizes)
        if scope == "batch":  # larger groups make up for groups that have fewer than keep
            asked = min(keep * len(sizes), sum(sizes))
        return rounded(asked, sum(sizes), multiple)

    def mark(values: Tensor, number: int) -> Tensor:
        """Marks ``number`` values of each row."""
        if number == 0:
            return torch.zeros_like(values, dtype=torch.bool)
        return select_rollouts(values, number, rule=rule, scope="group", generator=generator)

    def mark_in_each_group(values: Tensor, sizes: list[int], total: int) -> Tensor:
        """Marks the same number of values in each group, and one more in some groups. In a group with fewer values, all
        are marked.
        """
        each = min(total // max(1, len(sizes)), min(sizes, default=0))
        while each < max(sizes, default=0) and sum(min(each + 1, size) for size in sizes) <= total:
            each += 1
        kept, more = mark(values, each), total - sum(min(each, size) for size in sizes)
        if not more:
            return kept
        larger = mark(values, each + 1)
        can = larger.sum(dim=1) > each
        if rule == "random":
            further = select_rollouts(can.float(), more, rule=rule, scope="group", mask=can, generator=generator)
        else:
            further = topk_mask(_variances(values, larger), k=more, mask=can)
        return torch.where(further.unsqueeze(1), larger, kept)

    parts = ranks or 1
    if scope == "group" and len(table) % parts == 0:  # no group lies on two ranks
        each = len(table) // parts
        kept = torch.empty_like(table, dtype=torch.bool)
        for rank in range(parts):
            part = slice(rank * each, (rank + 1) * each)
            kept[part] = mark_in_each_group(table[part], sizes[part], number_kept(sizes[part], multiple_of // parts))
    else:
        total, rows = number_kept(sizes, multiple_of), table.reshape(parts, -1)
        if ranks is not None and rule == "max_variance":
            kept = most_varied(rows, torch.full((), total, device=table.device)).view_as(table)
        else:
            kept = mark(rows, total // parts).view_as(table)
    return kept if groups is None else kept.flatten()[places]


def rounded(asked: int, usable: int, multiple: int) -> int:
    """Rounds ``asked`` up to a number that ``multiple`` divides. If that number exceeds ``usable``, returns the largest
    such number that does not exceed ``usable``.
    """
    total = min(-(-asked // multiple), usable // multiple) * multiple
    if total == 0 < asked:
        raise ValueError(
            f"multiple_of: got {multiple}, and {usable} rollouts with a finite advantage; takes at most that many"
        )
    return total


def _variances(values: Tensor, chosen: Tensor) -> Tensor:
    """Returns the variance of each row's chosen values. Variances are rounded to 16 significant bits, so that variances
    which differ from each other only by rounding errors tie.
    """
    count = chosen.sum(dim=1, keepdim=True)
    numbers = torch.where(chosen, values, 0.0).double()
    apart = torch.where(chosen, numbers - numbers.sum(dim=1, keepdim=True) / count, 0.0)
    variance = (apart.square().sum(dim=1) / count[:, 0]).float()
    return ((variance.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
