"""Groups of rollouts that come in any order, each with the label of its group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from .._arguments.checks import require_tensors


def labels_of(groups: Iterable[Hashable] | Tensor) -> list[Hashable]:
    """Returns the labels as plain values, since tensors with equal values would be different keys of a dict."""
    if isinstance(groups, Tensor):
        return list(groups.tolist())
    return [label.item() if isinstance(label, Tensor) else label for label in groups]


def in_groups(values: Tensor, groups: Iterable[Hashable] | Tensor) -> tuple[Tensor, Tensor]:
    """Arranges one value for each rollout into a table of groups. Rollouts may be in any order, and groups may have any
    size.

    Args:
        values: float ``[N]``.
        groups: a label for each value, or an integer tensor ``[N]``. Values with equal labels form a group.

    Returns:
        ``(table, places)``. The table is ``[groups, n]``: a row for each group, in order of first appearance, padded
        with NaN. (:func:`d3s_kernels.group_advantages` leaves NaN out of means and returns advantage 0 for it.)
        ``places`` is int64 ``[N]``: the index of each value in the flattened table, so that ``table.flatten()[places]``
        gives the values back.

    Raises:
        ValueError: more or fewer labels than values; values of a dtype that is not float.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> from d3s_kernels.selection import in_groups
        >>> rewards, places = in_groups(torch.tensor([1.0, 5.0, 0.0]), ["a", "b", "a"])
        >>> rewards
        tensor([[1., 0.],
                [5., nan]])
        >>> d3s.group_advantages(rewards, scale="none").flatten()[places]
        tensor([ 0.5000,  0.0000, -0.5000])
    """
    require_tensors(values=values)
    labels = labels_of(groups)
    if values.shape != (len(labels),):
        shape = list(values.shape)
        raise ValueError(f"groups: got {len(labels)} for values of shape {shape}; takes one for each rollout")
    if not values.is_floating_point():
        raise ValueError(f"values: got dtype {values.dtype}; takes a float dtype, which has NaN")
    rows: dict[Hashable, list[int]] = {}
    for rollout, label in enumerate(labels):
        rows.setdefault(label, []).append(rollout)
    width = max(map(len, rows.values()), default=0)
    place_of = [0] * len(labels)
    for row, rollouts in enumerate(rows.values()):
        for column, rollout in enumerate(rollouts):
            place_of[rollout] = row * width + column
    places = torch.tensor(place_of, dtype=torch.int64, device=values.device)
    table = values.new_full((len(rows) * width,), torch.nan)
    table[places] = values
    return table.view(len(rows), width), places
