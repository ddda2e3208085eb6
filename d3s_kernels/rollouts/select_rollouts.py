"""Computes advantages, and chooses the rollouts to train on, by the largest variance or by another rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .._arguments.checks import require_number, require_tensors
from .._dispatch import ops
from .._rules.arguments import (
    group_advantages_arguments,
    max_variance_arguments,
    select_rollouts_arguments,
)
from .._rules.rules import marked_by_rule
from .._rules.variance import by_variance, checked_rewards, finite_in_groups, require_share, variances
from .._segments.segments import TOLERANCE
from .._segments.segments import without_spread as segments_without_spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Scale = Literal["group", "batch", "none"]
Scope = Literal["batch", "group"]
RolloutRule = Literal["max_variance", "highest", "largest_abs", "percentile", "random"]


def group_advantages(
    rewards: Tensor,
    *,
    offsets: Tensor | None = None,
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Literal["whole", "global"] = "whole",
    max_rollouts: int | None = None,
) -> Tensor:
    """Computes GRPO's advantages: ``(reward - mean of its group) / (standard deviation + eps)``.

    A NaN reward (a rollout that could not be scored) is left out of all statistics and has advantage 0. All advantages
    are 0 in a group of one, and in a group whose rewards are equal except for rounding (see
    :func:`groups_without_spread`). So rounding errors do not become advantages, whatever ``eps`` is. Advantages that
    depend on an infinite reward are NaN or infinite. Statistics are computed in float64. No gradient.

    Across ranks, rewards are gathered once. Nothing is sent if each group is whole on one rank and ``scale`` is not
    "batch". Rewards that are sent must have the same dtype on all ranks, after the conversion of integers. If dtypes
    differ, all ranks raise an error. On a GPU with ``max_rollouts``, the host cannot see whether dtypes differ, so all
    advantages are NaN instead.

    Args:
        rewards: ``[..., n]``, each row is a group; or ``[N]`` with ``offsets``. bool, integers, float16, bfloat16,
            float32 or float64. Integers of more than 16 bits are converted to float64, which is exact up to 2^53.
        scale: "group" divides by the standard deviation of the group, "batch" by the standard deviation of the batch
            (Lite-PPO), "none" does not divide (Dr. GRPO). TRL calls this argument ``scale_rewards``.
        eps: added to the standard deviation.
        ddof: 1 for the standard deviation of a sample (TRL, verl), 0 for the standard deviation of a population.

    Ragged batches:
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.

    Across ranks:
        process_group: a ``torch.distributed`` process group, or a device mesh of one dimension. ``rewards`` is then
            this rank's piece of a whole tensor, which is the concatenation of all ranks' pieces along the first
            dimension, in rank order. The result is bitwise equal to this rank's piece of the result for the whole
            tensor. Ranks may hold different numbers of rollouts, or none.
        placement: only with a process group. "whole": each group is whole on one rank; groups are the rows, or the
            segments of the rank's own ``offsets``. A 1-D tensor without offsets is an exception: it is one group over
            all ranks. "global": ``offsets`` are for the concatenation of all ranks' 1-D tensors and are the same on all
            ranks; a group may lie on several ranks.
        max_rollouts: only with a process group. The caller's upper bound on the number of rollouts of any rank; it must
            be the same on all ranks. With this bound, there is one collective and no host sync; each rank sends
            ``8 + 8 max_rollouts`` bytes, or ``8 + 4 max_rollouts`` bytes in selections. Without the bound, the ranks
            first gather their numbers of rollouts, which causes a host sync.

    Returns:
        float32, the shape of ``rewards``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, offsets, scale, eps or ddof.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.group_advantages(torch.tensor([[1.0, 0.0, 1.0, torch.nan]]), eps=0.0)
        tensor([[ 0.5774, -1.1547,  0.5774,  0.0000]])
    """
    if process_group is not None:
        from ..distributed import rollouts as across_ranks  # here, since some builds of torch have no process groups

        layout = across_ranks.Layout(process_group, placement, offsets, max_rollouts=max_rollouts)
        return across_ranks.group_advantages(rewards, scale, eps, ddof, layout)
    return ops.group_advantages(*group_advantages_arguments(rewards, offsets, scale, eps, ddof))


def groups_without_spread(rewards: Tensor, *, offsets: Tensor | None = None, tolerance: float | None = None) -> Tensor:
    """Marks the groups whose rewards are all equal except for rounding. Such groups teach nothing; DAPO leaves them
    out.

    Sums of the same terms may differ in their last bits if the terms are added in another order. In float32, even the
    standard deviation of equal values may be above 0. If rewards are divided by such a standard deviation, rounding
    errors become advantages. So the rewards of a group count as equal if
    ``max - min <= tolerance * max(1, largest |reward|)``. Rewards that are not finite are left out.

    Args:
        rewards: as in :func:`group_advantages`.
        tolerance: at least 0. None means a tolerance that depends on the dtype. For float32, bool and integers of up to
            16 bits, it is 1e-6; for float64 and longer integers, 2e-15. Each is about eight rounding steps of the float
            dtype. For half precision, it is one rounding step of the dtype.

    Ragged batches:
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.

    Returns:
        bool ``[...]``, or ``[groups]`` with offsets. A group with fewer than two finite rewards is also marked. No host
        sync.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or offsets, or a tolerance below 0.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> a, b, c = torch.tensor([0.1, 0.2, 0.35])
        >>> rewards = torch.stack([a + b + c, c + b + a, torch.tensor(0.0), torch.tensor(1.0)]).view(2, 2)
        >>> rewards.std(dim=1) == 0, d3s.groups_without_spread(rewards)
        (tensor([False, False]), tensor([ True, False]))
    """
    rewards = checked_rewards(rewards, offsets)
    if tolerance is None:
        tolerance = TOLERANCE[rewards.dtype]
    require_number(tolerance=tolerance)
    if not tolerance >= 0:
        raise ValueError(f"tolerance: got {tolerance}; takes at least 0")
    finite, groups = finite_in_groups(rewards, offsets)
    same = groups.without_ends(segments_without_spread(rewards.flatten().double(), finite, groups, tolerance))
    return same if offsets is not None else same.view(rewards.shape[:-1])


@torch.no_grad()
def variance_mass(
    rewards: Tensor,
    share: float,
    *,
    offsets: Tensor | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Literal["whole", "global"] = "whole",
    max_rollouts: int | None = None,
) -> Tensor:
    """Marks the fewest groups that have a share of the variance of all groups (RAGEN-2, arXiv 2604.06268).

    A group's variance is the mean of ``(reward - mean)^2`` over its rewards. Groups are taken by descending variance,
    until the sum of their variances is at least ``share`` times the sum over all groups. Variances that are equal
    except for rounding tie, and ties go to the lower index. In this order of the variances, two neighbours tie if they
    differ by at most 1e-5 of the larger one; the share counts as reached if no more than 1e-5 of it is missing.

    A group without spread (:func:`groups_without_spread`) has the variance 0 and is never marked. So a share of 1 marks
    exactly the groups with spread. If no group has spread, nothing is marked. Rewards that are not finite are left out.
    Variances are computed in float64.

    Across ranks, one number is gathered for each group; rewards are gathered only if a group lies on several ranks.

    Args:
        rewards: as in :func:`group_advantages`.
        share: in (0, 1].

    Ragged batches:
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.

    Across ranks:
        process_group, placement, max_rollouts: as in :func:`group_advantages`. No rank may have more than
            ``max_rollouts`` groups either. The result is this rank's part of the result for the rewards of all ranks.
            If groups may lie on several ranks, it is the whole result.

    Returns:
        bool ``[...]``, or ``[groups]`` with offsets. No host sync in one process, and none across ranks with
        ``max_rollouts``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or offsets; a share outside (0, 1].

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> rewards = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
        >>> d3s.variance_mass(rewards, 0.5), d3s.variance_mass(rewards, 0.9)
        (tensor([False, False,  True]), tensor([False,  True,  True]))
    """
    if process_group is not None:
        from ..distributed import rollouts as across_ranks

        layout = across_ranks.Layout(process_group, placement, offsets, max_rollouts=max_rollouts)
        return across_ranks.variance_mass(rewards, share, layout)
    rewards = checked_rewards(rewards, offsets)
    require_share(share)
    marked = by_variance(variances(rewards, offsets), share).marked()
    return marked if offsets is not None else marked.view(rewards.shape[:-1])


def max_variance_select(
    values: Tensor,
    keep: int | Tensor,
    *,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    mask: Tensor | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Literal["whole", "global"] = "whole",
    max_rollouts: int | None = None,
) -> Tensor:
    """In each segment, marks the ``keep`` values whose variance is the largest of all subsets of this size.

    The best subset consists of the i lowest and the ``keep - i`` highest values for some i (PODS, arXiv 2504.13818,
    Lemma 3.1); all i are tried. Values are ordered by (value, index). If the variances of several subsets are equal, up
    to a relative difference of 1e-12, the subset that contains the fewest of the highest values is kept.

    Across ranks, values are gathered once. Nothing is sent if each segment is whole on one rank.

    Args:
        values: ``[..., n]``, each row is a segment; or ``[N]`` with ``offsets``. float32, bfloat16, float16, bool or
            integers, which are converted to float32: exact up to 2^24.
        keep: at least 1: a number, or a 0-d int64 or int32 tensor, which is read on the device.
        mask: bool, or integer (0 means False), the shape of ``values``. Values where the mask is False are never kept.
            NaN and infinite values are never kept either.

    Ragged batches:
        offsets: int32 or int64 ``[segments + 1]``, from 0 to N.
        max_segment: the caller's upper bound on the length of a segment; an optional hint for GPUs.

    Across ranks:
        process_group, placement, max_rollouts: as in :func:`group_advantages`.

    Returns:
        bool, the shape of ``values``: exactly ``keep`` values of each segment, or all usable values if there are fewer.

    Raises:
        ValueError, TypeError: keep below 1, a wrong shape, dtype, device or offsets.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.max_variance_select(torch.tensor([[0.5, 0.0, 1.0, 0.4, 1.0, 0.1]]), 3)
        tensor([[False,  True,  True, False,  True, False]])
    """
    if process_group is not None:
        from ..distributed import rollouts as across_ranks

        layout = across_ranks.Layout(process_group, placement, offsets, max_segment, max_rollouts)
        return across_ranks.select_rollouts(
            values, keep, "max_variance", "group", mask, None, False, layout, call="max_variance_select"
        )
    require_tensors(values=values)
    segments = offsets, max_segment, False
    return ops.max_variance_select(*max_variance_arguments(values, keep, mask, segments))


def select_rollouts(
    advantages: Tensor,
    keep: int | Tensor,
    *,
    rule: RolloutRule = "max_variance",
    offsets: Tensor | None = None,
    scope: Scope = "batch",
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Literal["whole", "global"] = "whole",
    max_rollouts: int | None = None,
    equal_rows: bool = False,
) -> Tensor:
    """Marks the rollouts to train on. A rule chooses them from each group, or from all groups pooled.

    ================ ============================================================== ===============================
    ``rule``         keeps                                                          source
    ================ ============================================================== ===============================
    "max_variance"   the subset with the largest variance: max_variance_select      D3S, PODS
    "highest"        the largest values                                             PODS max-reward; GFPO of a metric
    "largest_abs"    the largest absolute values                                    CPPO, of advantages
    "percentile"     values nearest the (i + 0.5) / k quantiles, i = 0 ... k - 1    PODS percentile (see below)
    "random"         any subset, all equally likely                                 PODS random
    ================ ============================================================== ===============================

    Each rule keeps exactly ``keep`` values, or all usable values if there are fewer. Ties go to the lower index.

    The definition of PODS's percentile rule could not be confirmed: it is neither in the published code nor in a text
    that we could read. Here the n usable values are ordered by (value, index), and the k = ``keep`` values at the
    positions nearest to ``(i + 0.5) / k * (n - 1)`` are kept. Positions are counted from 0; if two positions are
    equally near, the lower one is taken. The k positions are all different.

    Across ranks, advantages are gathered once. Nothing is sent if ``scope`` is "group" and each group is whole on one
    rank. With scope "batch", the ranks together keep ``keep * groups`` rollouts, where ``groups`` is the number of
    groups of all ranks. The ranks usually keep different numbers of rollouts. For equal numbers, either pass
    ``equal_rows=True``, or move kept rows with :func:`d3s_kernels.distributed.plan_rows`.

    With ``equal_rows``, each rank keeps some of its lowest and some of its highest values. All ranks together decide
    how many lowest and how many highest values a rank keeps. Finding the best choice is as hard as the partition
    problem, so the choice made here is only nearly the best: its sum of squared deviations is at most ``d^2 / (4 k)``
    below the largest possible sum. Here k is the number of values kept on all ranks, and d is the difference of two
    values of one rank: see ``d3s_kernels/_rules/equal_rows.py``. No more data is sent than without ``equal_rows``.

    Args:
        advantages: ``[..., n]``, each row is a group; or ``[N]`` with ``offsets``. float32, bfloat16, float16, bool or
            integers, which are converted to float32: exact up to 2^24. Instead of advantages, you may pass rewards or
            any other value for each rollout (for GFPO's shortest responses: ``-length``).
        keep: the number of rollouts to keep for each group, at least 1: a number, or a 0-d int64 or int32 tensor, which
            is read on the device.
        rule: see the table. Sources: D3S, arXiv 2509.22115; PODS, 2504.13818; GFPO, 2508.09726; CPPO, 2503.22342.
        scope: "batch" pools all groups and keeps ``keep`` times the number of groups, so that a group with equal
            advantages can keep fewer rollouts, and other groups more (D3S). "group" keeps ``keep`` rollouts of each
            group (D3S-I; PODS, GFPO).
        mask: bool, or integer (0 means False), the shape of ``advantages``. Rollouts where the mask is False are never
            kept. NaN and infinite values are never kept either.
        generator: for "random": a generator on the device of ``advantages``, or None for torch's default generator.
            ``torch.compile(fullgraph=True)`` requires None.

    Ragged batches:
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.

    Across ranks:
        process_group, placement, max_rollouts: as in :func:`group_advantages`. For "random" each rank draws with its
            own generator. All subsets are equally likely, even if the ranks use the same seed.
        equal_rows: keep the same number of rollouts on every rank; only with rule "max_variance" and scope "batch".
            This number is ``keep`` times the number of groups on all ranks, divided by the number of ranks and rounded
            up. But if a rank has fewer usable values, or none, all ranks keep only as many as this rank has.

    Returns:
        bool, the shape of ``advantages``.

    Raises:
        ValueError, TypeError: as :func:`max_variance_select`; an unknown rule; a generator with a rule other than
            "random"; ``equal_rows`` with another rule or scope.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> advantages = torch.tensor([[0.0, 0.0, 0.0], [1.2, -0.6, -0.6]])
        >>> d3s.select_rollouts(advantages, 1)
        tensor([[False, False, False],
                [ True,  True, False]])
        >>> lengths = torch.tensor([[310, 120, 205]])
        >>> d3s.select_rollouts(-lengths, 2, rule="highest", scope="group")
        tensor([[False,  True,  True]])
    """
    if process_group is not None:
        from ..distributed import rollouts as across_ranks

        layout = across_ranks.Layout(process_group, placement, offsets, max_rollouts=max_rollouts)
        return across_ranks.select_rollouts(advantages, keep, rule, scope, mask, generator, equal_rows, layout)
    arguments = select_rollouts_arguments(advantages, keep, rule, scope, mask, offsets, generator, equal_rows)
    return marked_by_rule(rule, generator, *arguments)
