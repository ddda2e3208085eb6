"""Which rollouts are worth an update: advantages, and the subset with the largest variance."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from . import _ops
from ._arguments import (
    require_number,
    require_optional_tensors,
    require_scope,
    require_tensors,
    require_whole,
    whole_or_tensor,
)


def group_advantages(
    rewards: Tensor,
    *,
    offsets: Tensor | None = None,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """GRPO's advantages: ``(reward - mean of its group) / (standard deviation + eps)``.

    A NaN reward is unscorable: it is left out of all statistics and has advantage 0. So has a group of one, and a
    group whose rewards are all equal. Statistics are float64. No gradient.

    Args:
        rewards: ``[..., n]``, a group for each row; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.
        scale: "group" divides by the group's standard deviation, "batch" by that of all rewards (Lite-PPO),
            "none" by nothing (Dr. GRPO); TRL's ``scale_rewards``.
        eps: added to the standard deviation.
        ddof: 1 for the sample's standard deviation (TRL, verl), 0 for the population's.

    Returns:
        float32, the shape of ``rewards``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device, offsets, scale, eps or ddof.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.group_advantages(torch.tensor([[1.0, 0.0, 1.0, torch.nan]]), eps=0.0)
        tensor([[ 0.5774, -1.1547,  0.5774,  0.0000]])
    """
    require_tensors(rewards=rewards)
    require_optional_tensors(rewards, offsets=offsets)
    require_whole(ddof=ddof)
    require_number(eps=eps)
    if not isinstance(scale, str):
        raise TypeError(f"scale: got {scale!r}; takes 'group', 'batch' or 'none'")
    result: Tensor = _ops.group_advantages(rewards, offsets, scale, eps, ddof)
    return result


def max_variance_select(
    values: Tensor,
    keep: int | Tensor,
    *,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Marks the ``keep`` values of each segment whose variance is the largest of all such subsets.

    The best subset is the i lowest and the keep - i highest for some i (PODS, arXiv 2504.13818, Lemma 3.1); all i are
    tried. Order is by (value, index); among equal variances (relative 1e-12) the subset with the fewest from the top
    is taken.

    Args:
        values: ``[..., n]``, a segment for each row; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        keep: at least 1: a number, or a 0-d int64 or int32 tensor, which is read on the device.
        offsets: int32 or int64 ``[segments + 1]``, from 0 to N.
        max_segment: the caller's bound on a segment's length: a hint for GPUs, never needed.
        mask: bool, the shape of ``values``; False is never kept. Neither is a value that is NaN or infinite.

    Returns:
        bool, the shape of ``values``: exactly ``keep`` of each segment, or all usable ones where there are no more.

    Raises:
        ValueError, TypeError: keep below 1, a wrong shape, dtype, device or offsets.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.max_variance_select(torch.tensor([[0.5, 0.0, 1.0, 0.4, 1.0, 0.1]]), 3)
        tensor([[False,  True,  True, False,  True, False]])
    """
    require_tensors(values=values)
    require_optional_tensors(values, offsets=offsets, mask=mask)
    return _select(values, keep, offsets, max_segment, mask, pooled=False)


def select_rollouts(
    advantages: Tensor,
    keep: int | Tensor,
    *,
    offsets: Tensor | None = None,
    scope: Literal["batch", "group"] = "batch",
) -> Tensor:
    """Marks the rollouts that D3S (arXiv 2509.22115) trains on, by :func:`max_variance_select` of their advantages.

    Args:
        advantages: ``[..., n]``, a group for each row; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        keep: rollouts kept for each group, at least 1: a number or a 0-d integer tensor.
        offsets: int32 or int64 ``[groups + 1]``, from 0 to N.
        scope: "batch" pools all groups and keeps ``keep`` times their number, so that groups without a spread give
            their places to others (D3S); "group" keeps ``keep`` of each (D3S-I; the subset that PODS picks).

    Returns:
        bool, the shape of ``advantages``.

    Raises:
        ValueError, TypeError: as :func:`max_variance_select`.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> advantages = torch.tensor([[0.0, 0.0, 0.0], [1.2, -0.6, -0.6]])
        >>> d3s.select_rollouts(advantages, 1)
        tensor([[False, False, False],
                [ True,  True, False]])
    """
    require_tensors(advantages=advantages)
    require_optional_tensors(advantages, offsets=offsets)
    return _select(advantages, keep, offsets, None, None, pooled=require_scope(scope, "group"))


def _select(
    values: Tensor,
    keep: int | Tensor,
    offsets: Tensor | None,
    max_segment: int | None,
    mask: Tensor | None,
    pooled: bool,
) -> Tensor:
    whole, tensor = whole_or_tensor("keep", keep, values)
    require_whole(max_segment=max_segment)
    result: Tensor = _ops.max_variance_select(values, whole, tensor, mask, offsets, max_segment, pooled)
    return result
