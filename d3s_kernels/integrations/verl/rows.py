"""Chooses the rows of a batch to keep: plain functions on the driver's CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...rollouts import RolloutRule, group_advantages, groups_without_spread
from ...selection import choose_rollouts

if TYPE_CHECKING:
    from verl import DataProto

Scale = Literal["group", "batch", "none"]


def rollout_advantages(rewards: Tensor, groups: Iterable[Hashable], *, scale: Scale = "group") -> Tensor:
    """GRPO's advantages with verl's eps of 1e-6, for rollouts in any order and groups of any size.

    Args:
        rewards: ``[N]``, float32, bfloat16 or float16.
        groups: the group of each rollout; verl's ``uid``.
        scale: as in :func:`d3s_kernels.group_advantages`.

    Returns:
        float32 ``[N]``; NaN where the reward is NaN, so that such a rollout is never chosen.

    Raises:
        ValueError, TypeError: as :func:`d3s_kernels.group_advantages`.

    Example:
        >>> import torch
        >>> from d3s_kernels.integrations.verl.rows import rollout_advantages
        >>> rollout_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0]), ["a", "b", "a", "b"], scale="none")
        tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    order, offsets = _by_group(groups)
    advantages = torch.empty(len(rewards))
    advantages[order] = group_advantages(rewards[order], offsets=offsets, scale=scale, eps=1e-6)
    return advantages.masked_fill(rewards.isnan(), math.nan)


def select(
    batch: DataProto,
    keep: int,
    *,
    rule: RolloutRule = "max_variance",
    scope: Literal["batch", "group"] = "batch",
    multiple_of: int = 1,
    scale: Scale = "group",
) -> Tensor:
    """The rows of a ``DataProto`` to train on, for ``batch.select_idxs`` in ray_trainer's loop or in a fork of it.

    Groups are ``non_tensor_batch["uid"]``, in any order and of any size. A rollout's advantage is the mean of
    ``advantages`` over its ``response_mask`` if the batch has them. Otherwise it comes from the sums of
    ``token_level_rewards``, or else of ``token_level_scores``, as in :func:`rollout_advantages`. Advantages already in
    the batch stay with the kept rows. A trainer that computes advantages afterwards normalises over the kept rollouts
    (PODS).

    Args:
        batch: with tensors ``[N, T]`` as above.
        keep: rollouts kept for each group; ``DownSamplingSchedule()(progress).rollouts``.
        rule, scope, multiple_of: as in :func:`d3s_kernels.selection.choose_rollouts`. verl wants a multiple of
            lcm(data-parallel size, ``ppo_mini_batch_size * rollout.n``).
        scale: as in :func:`d3s_kernels.group_advantages`; not used where the batch has advantages.

    Returns:
        int64, ascending.

    Raises:
        ValueError: a batch without these; also as :func:`d3s_kernels.selection.choose_rollouts`.

    Example:
        >>> rows = select(batch, keep=8, multiple_of=64)  # doctest: +SKIP
        >>> batch = batch.select_idxs(rows)  # doctest: +SKIP
    """
    if "uid" not in batch.non_tensor_batch:
        raise ValueError(f"batch: has {_names(batch.non_tensor_batch)}; takes a non_tensor_batch with 'uid'")
    uids, data = list(batch.non_tensor_batch["uid"]), batch.batch
    if "advantages" in data and "response_mask" in data:
        mask = data["response_mask"].bool()
        # In float64 the mean of equal numbers is exactly that number, however many there are.
        total = data["advantages"].masked_fill(~mask, 0.0).double().sum(-1)
        advantages = (total / mask.sum(-1).clamp(min=1)).float()
    elif "token_level_rewards" in data or "token_level_scores" in data:
        rewards = data["token_level_rewards" if "token_level_rewards" in data else "token_level_scores"]
        advantages = rollout_advantages(rewards.float().sum(-1), uids, scale=scale)
    else:
        takes = "'advantages' and 'response_mask', 'token_level_rewards' or 'token_level_scores'"
        raise ValueError(f"batch: has {_names(data)}; takes {takes}")
    kept = choose_rollouts(advantages, keep, rule=rule, scope=scope, groups=uids, multiple_of=multiple_of)
    return kept.nonzero().flatten()


def without_spread(rewards: Tensor, groups: Iterable[Hashable]) -> Tensor:
    """bool ``[groups]``: which of them have rewards that are all equal, see :func:`d3s_kernels.groups_without_spread`.

    Example:
        >>> import torch
        >>> from d3s_kernels.integrations.verl.rows import without_spread
        >>> without_spread(torch.tensor([1.0, 5.0, 0.0]), ["a", "b", "a"])
        tensor([False,  True])
    """
    order, offsets = _by_group(groups)
    return groups_without_spread(rewards[order], offsets=offsets)


def sessions(keys: Sequence[str]) -> list[list[int]]:
    """The rows of each rollout's outputs, in the order of the outputs. verl's keys are ``{uid}_{session}_{output}``.

    Example:
        >>> from d3s_kernels.integrations.verl.rows import sessions
        >>> sessions(["a_0_1", "a_1_0", "a_0_0"])
        [[1], [2, 0]]
    """
    names = [key.rsplit("_", 1) for key in keys]
    rows: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=lambda row: int(names[row][1])):
        rows.setdefault(names[row][0], []).append(row)
    return list(rows.values())


def rows_of_an_update(kept: int, rows: int, before: int, unit: int) -> int:
    """The rows of one optimiser update after the selection, so that a step makes as many updates as without it.

    Args:
        kept: rows after the selection.
        rows: rows before the selection.
        before: rows of an update without the selection; verl's ``ppo_mini_batch_size * rollout.n``.
        unit: the result is a multiple of this; data-parallel ranks times rows of a micro-batch.

    Example:
        >>> from d3s_kernels.integrations.verl.rows import rows_of_an_update
        >>> rows_of_an_update(kept=512, rows=2048, before=1024, unit=8)  # 2 updates, as before
        256
    """
    updates = -(-rows // before)
    return -(-kept // (updates * unit)) * unit


def _by_group(groups: Iterable[Hashable]) -> tuple[Tensor, Tensor]:
    """The rows sorted by group, and the row where each group starts (``offsets``, as everywhere in the library)."""
    labels: dict[Hashable, int] = {}
    label = torch.tensor([labels.setdefault(group, len(labels)) for group in groups], dtype=torch.int64)
    offsets = torch.zeros(len(labels) + 1, dtype=torch.int64)
    offsets[1:] = label.bincount(minlength=len(labels)).cumsum(0)
    return label.argsort(stable=True), offsets


def _names(mapping: Any) -> str:
    return ", ".join(map(repr, sorted(mapping.keys()))) or "nothing"
