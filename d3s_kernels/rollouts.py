"""Which rollouts are worth an update: advantages, and the subset with the largest variance or by another rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ._arguments import require_tensors
from ._dispatch import ops
from ._selection.rollouts import (
    AdvantageArguments,
    RolloutArguments,
    check_advantages,
    check_rule,
    checked_number,
    select_by_rule,
)

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
    """GRPO's advantages: ``(reward - mean of its group) / (standard deviation + eps)``.

    A NaN reward is unscorable: it is left out of all statistics and has advantage 0. So has a group of one, and a
    group whose rewards are all equal. Beside an infinite reward, advantages are NaN or infinite. Statistics are
    float64. No gradient.

    Across ranks rewards are gathered once; nothing is where groups are whole and ``scale`` is not "batch".

    Args:
        rewards: ``[..., n]``, a group for each row; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.
        scale: "group" divides by the group's standard deviation, "batch" by that of all rewards (Lite-PPO),
            "none" by nothing (Dr. GRPO); TRL's ``scale_rewards``.
        eps: added to the standard deviation.
        ddof: 1 for the sample's standard deviation (TRL, verl), 0 for the population's.
        process_group: a ``torch.distributed`` process group, or a device mesh of one dimension. ``rewards`` are then
            this rank's piece of one tensor, all ranks' in rank order along the first dimension, and the result is this
            rank's piece of what that one gives, to the bit. Ranks may hold different numbers, or none.
        placement: with a process group, "whole": every row, or segment of the rank's own ``offsets``, is whole on its
            rank. "global": ``offsets`` are of all ranks' 1-D tensors one after the other, the same on all ranks, so
            that a group may lie on several. A 1-D tensor without offsets is one group over all ranks.
        max_rollouts: with a process group, the caller's bound on how many any rank holds, the same on all ranks. With
            it there is one round, of ``8 + 4 max_rollouts`` bytes from each rank, and nothing waits for the device.
            Without it how many each holds is gathered first, and the host waits for that.

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
        from ._across_ranks import rollouts as across_ranks  # here, as there are builds of torch that know no groups

        arguments = AdvantageArguments(rewards, offsets, scale, eps, ddof)
        return across_ranks.group_advantages(arguments, across_ranks.Across(process_group, placement, max_rollouts))
    check_advantages(rewards, offsets, scale, eps, ddof)
    result: Tensor = ops.group_advantages(rewards, offsets, scale, eps, ddof)
    return result


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
    """Marks the ``keep`` values of each segment whose variance is the largest of all such subsets.

    The best subset is the i lowest and the keep - i highest for some i (PODS, arXiv 2504.13818, Lemma 3.1); all i are
    tried. Order is by (value, index); among equal variances (relative 1e-12) the subset with the fewest from the top
    is taken.

    Across ranks values are gathered once; nothing is where segments are whole.

    Args:
        values: ``[..., n]``, a segment for each row; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        keep: at least 1: a number, or a 0-d int64 or int32 tensor, which is read on the device.
        offsets: int32 or int64 ``[segments + 1]``, from 0 to N.
        max_segment: the caller's bound on a segment's length: a hint for GPUs, never needed.
        mask: bool, the shape of ``values``; False is never kept. Neither is a value that is NaN or infinite.
        process_group, placement, max_rollouts: as in :func:`group_advantages`.

    Returns:
        bool, the shape of ``values``: exactly ``keep`` of each segment, or all usable ones where there are no more.

    Raises:
        ValueError, TypeError: keep below 1, a wrong shape, dtype, device or offsets.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.max_variance_select(torch.tensor([[0.5, 0.0, 1.0, 0.4, 1.0, 0.1]]), 3)
        tensor([[False,  True,  True, False,  True, False]])
    """
    if process_group is not None:
        from ._across_ranks import rollouts as across_ranks

        arguments = RolloutArguments(
            "max_variance_select", values, keep, "max_variance", offsets, "group", mask, max_segment
        )
        return across_ranks.select(arguments, across_ranks.Across(process_group, placement, max_rollouts))
    require_tensors(values=values)
    number = checked_number(values, keep, offsets, mask, max_segment)
    result: Tensor = ops.max_variance_select(values, *number, mask, offsets, max_segment, False)
    return result


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
    """Marks the rollouts that a rule trains on: of each group, or of all groups as one.

    ================ ============================================================== ===============================
    ``rule``         keeps                                                          is
    ================ ============================================================== ===============================
    "max_variance"   the subset with the largest variance: max_variance_select      D3S, PODS
    "highest"        the largest values                                             PODS max-reward; GFPO of a metric
    "largest_abs"    the largest absolute values                                    CPPO, of advantages
    "percentile"     those nearest the (i + 0.5) / k quantiles, i = 0 ... k - 1     PODS percentile, as we take it
    "random"         any subset, all equally likely                                 PODS random
    ================ ============================================================== ===============================

    Each is exact: ``keep`` values, or all usable ones where there are no more; ties go to the lower index.

    The definition of PODS's percentile rule could not be confirmed: neither its published code nor a text that could
    be read has it. Here, of the n usable values by (value, index), the ranks nearest to ``(i + 0.5) / k * (n - 1)``
    are kept, half rounded down; no two of them are the same.

    Across ranks advantages are gathered once; nothing is where ``scope`` is "group" and groups are whole. "batch" keeps
    ``keep`` times the groups of all ranks, and so not the same number on each: either ``equal_rows`` binds the choice
    to that, or :func:`d3s_kernels.distributed.plan_rows` evens out the kept rows by moving some.

    Under ``equal_rows`` each rank keeps its lowest and its highest, and how many of each is chosen for all ranks
    together. The best choice is as hard to find as numbers are to divide into equal sums; the one that is found has a
    sum of squared deviations within ``d^2 / (4 k)`` of it, for k kept in all and d the difference of two values of one
    rank: see ``d3s_kernels/_across_ranks/equal_rows.py``. It sends no more than the choice without it.
    With 8 prompts of 16 rollouts on each of 64 ranks, half of them kept, the limit itself took 1.9 % of the variance of
    advantages of 0-1 rewards, and 0.2 % of normal ones; had each rank chosen alone, 2.3 % and 0.6 %
    (``python -m benchmarks.equal_rows``).

    Args:
        advantages: ``[..., n]``, a group for each row; or ``[N]`` with ``offsets``. float32, bfloat16 or float16. They
            may as well be rewards, or another number of each rollout (GFPO's shortest responses: ``-length``).
        keep: rollouts kept for each group, at least 1: a number, or a 0-d int64 or int32 tensor, which is read on the
            device.
        rule: see the table. Sources: D3S, arXiv 2509.22115; PODS, 2504.13818; GFPO, 2508.09726; CPPO, 2503.22342.
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.
        scope: "batch" pools all groups and keeps ``keep`` times their number, so that groups without a spread give
            their places to others (D3S); "group" keeps ``keep`` of each (D3S-I; PODS, GFPO).
        mask: bool, the shape of ``advantages``; False is never kept. Neither is a value that is NaN or infinite.
        generator: for "random", of the device of ``advantages``; torch's own where it is None, as it has to be under
            ``torch.compile(fullgraph=True)``.
        process_group, placement, max_rollouts: as in :func:`group_advantages`. "random" draws for each rank's with its
            own generator, which may be seeded as the others' are; all subsets are equally likely still.
        equal_rows: keep the same number on every rank, for "max_variance" and "batch": ``keep`` times the groups of all
            ranks, over the ranks, rounded up; or as many as the rank with the fewest usable ones has, which may be
            none. See below.

    Returns:
        bool, the shape of ``advantages``.

    Raises:
        ValueError, TypeError: as :func:`max_variance_select`; an unknown rule; a generator with a rule that draws
            nothing; ``equal_rows`` with another rule or scope.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> advantages = torch.tensor([[0.0, 0.0, 0.0], [1.2, -0.6, -0.6]])
        >>> d3s.select_rollouts(advantages, 1)
        tensor([[False, False, False],
                [ True,  True, False]])
        >>> lengths = torch.tensor([[310.0, 120.0, 205.0]])
        >>> d3s.select_rollouts(-lengths, 2, rule="highest", scope="group")
        tensor([[False,  True,  True]])
    """
    if process_group is not None:
        from ._across_ranks import rollouts as across_ranks

        arguments = RolloutArguments(
            "select_rollouts", advantages, keep, rule, offsets, scope, mask, None, generator, equal_rows
        )
        return across_ranks.select(arguments, across_ranks.Across(process_group, placement, max_rollouts))
    require_tensors(advantages=advantages)
    number = checked_number(advantages, keep, offsets, mask, None)
    check_rule(advantages, keep, rule, scope, generator, equal_rows)
    if rule != "max_variance":
        return select_by_rule(rule, advantages, keep, mask, offsets, scope == "batch", generator)
    result: Tensor = ops.max_variance_select(advantages, *number, mask, offsets, None, scope == "batch")
    return result
