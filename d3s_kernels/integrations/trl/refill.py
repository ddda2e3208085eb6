"""DAPO's dynamic sampling (arXiv 2503.14476): groups of further prompts replace groups whose rewards are all equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def other_prompts(
    dataset: Any, columns: Iterable[str], groups: int, generations: int, ranks: int, rank: int, *seeds: int
) -> list[dict[str, Any]]:
    """Returns examples for ``groups`` further groups of this rank, each repeated ``generations`` times. The data set is
    shuffled with ``seeds``: the run's seed, the step, and the number of earlier refills of the batch. Each rank takes
    its own part of the shuffled data set. The result has only ``columns``: the columns of an example as TRL receives
    it.
    """
    seed = 0
    for part in seeds:
        seed = (seed * 1_000_003 + part) % 2**63
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [order[(rank * groups + group) % len(order)] for group in range(groups)]
    return [{column: dataset[index][column] for column in columns} for index in drawn for _ in range(generations)]


def replacements(same: Tensor, same_of_more: Tensor) -> Tensor:
    """Returns, for each group of each rank, the index of the group to train on: its own index, or the index of the
    further group that replaces it. A rank's further groups are counted after its own groups, so the first further group
    has the index ``groups``. ``same``, ``[ranks, groups]``, marks the groups whose rewards are all equal, and
    ``same_of_more`` the further groups whose rewards are all equal.

    Example:
        >>> import torch
        >>> from d3s_kernels.integrations.trl.refill import replacements
        >>> replacements(torch.tensor([[True, False, True]]), torch.tensor([[True, False]]))
        tensor([[4, 1, 2]])
    """
    groups = []
    for ours, more in zip(same.tolist(), same_of_more.tolist(), strict=True):
        good = [len(ours) + place for place, is_same in enumerate(more) if not is_same]
        groups.append([good.pop(0) if is_same and good else group for group, is_same in enumerate(ours)])
    return torch.tensor(groups, device=same.device)


def rows_of(groups: Tensor, generations: int) -> Tensor:
    """Returns the indices of all rows of the given groups, in the order of the groups:
    ``[ranks, groups * generations]``.
    """
    return (groups.unsqueeze(2) * generations + torch.arange(generations, device=groups.device)).flatten(1)


def take_logged(logs: dict[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Removes all rows from TRL's table of completions. Returns the values of each column, in rank order."""
    columns = _columns(logs)
    rows = {name: list(column) for name, column in columns.items()}
    for column in columns.values():
        column.clear()
    return rows


def log_again(logs: dict[str, Any], before: dict[tuple[str, str], list[Any]], rows: Tensor, more: int) -> None:
    """Writes the rows of a refilled batch into TRL's table of completions, ``logs``.

    ``before``, from :func:`take_logged`, has the earlier rows: ``rows.shape[1]`` for each rank. ``logs`` has only the
    further rows: ``more`` for each rank. ``rows``, from :func:`rows_of`, has the indices of the rows that each rank
    keeps. In these indices, a rank's further rows are counted after its earlier rows.
    """
    ranks, count = rows.shape
    for name, column in _columns(logs).items():
        earlier, further = before.get(name, []), list(column)
        if not earlier and not further:  # TRL does not use this column
            continue
        # TRL may have kept only the latest rows of a column, or no rows. Each missing row becomes None.
        earlier = [None] * (ranks * count - len(earlier)) + earlier
        further = [None] * (ranks * more - len(further)) + further
        column.clear()
        for rank, chosen in enumerate(rows.tolist()):
            values = earlier[rank * count : (rank + 1) * count] + further[rank * more : (rank + 1) * more]
            column.extend(values[row] for row in chosen)


def _columns(logs: dict[str, Any]) -> dict[tuple[str, str], deque[Any]]:
    """Returns the columns of TRL's table. Rewards, and the values that reward functions log, are in nested tables."""
    tables = {name: {name: part} if isinstance(part, deque) else part for name, part in logs.items()}
    return {(table, name): column for table, columns in tables.items() for name, column in columns.items()}
