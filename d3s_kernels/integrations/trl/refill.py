"""DAPO's dynamic sampling (arXiv 2503.14476): groups of other prompts take the place of those without a spread."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


def other_prompts(
    dataset: Any, like: dict[str, Any], groups: int, generations: int, ranks: int, rank: int, *seeds: int
) -> list[dict[str, Any]]:
    """Examples for ``groups`` more groups of this rank, drawn from the data set in an order that the seeds decide.

    Args:
        dataset: TRL's, with a length.
        like: an example of the batch, which has the columns that TRL keeps.
        generations: how often each example is repeated.
        ranks, rank: every rank draws the same order and takes its own part.
        seeds: the run's, the step, and how often the batch was refilled already.
    """
    seed = 0
    for part in seeds:
        seed = (seed * 1_000_003 + part) % 2**63
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [order[(rank * groups + group) % len(order)] for group in range(groups)]
    return [{column: dataset[index][column] for column in like} for index in drawn for _ in range(generations)]


def replacements(same: Tensor, same_of_more: Tensor) -> Tensor:
    """For each group of each rank the group that takes its place: itself, or one of the further ones with a spread.

    Args:
        same: bool ``[ranks, groups]``, which groups have no spread.
        same_of_more: bool ``[ranks, more]``, the same for the further groups, whose numbers follow.

    Returns:
        int64 ``[ranks, groups]``.

    Example:
        >>> import torch
        >>> from d3s_kernels.integrations.trl.refill import replacements
        >>> replacements(torch.tensor([[True, False, True]]), torch.tensor([[True, False]]))
        tensor([[4, 1, 2]])
    """
    found = []
    for of_rank, of_more in zip(same.tolist(), same_of_more.tolist(), strict=True):
        good = [len(of_rank) + place for place, is_same in enumerate(of_more) if not is_same]
        found.append([good.pop(0) if is_same and good else group for group, is_same in enumerate(of_rank)])
    return torch.tensor(found, device=same.device)


def rows_of(groups: Tensor, generations: int) -> Tensor:
    """The rows of these groups, in their order: ``[ranks, groups * generations]``."""
    own = torch.arange(generations, device=groups.device)
    return (groups.unsqueeze(2) * generations + own).flatten(1)


def take_logged(logs: dict[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Takes all rows out of TRL's table of completions. Returns them by column, in rank order."""
    columns = _columns(logs)
    rows = {name: list(column) for name, column in columns.items()}
    for column in columns.values():
        column.clear()
    return rows


def log_again(logs: dict[str, Any], before: dict[tuple[str, str], list[Any]], rows: Tensor, more: int) -> None:
    """Puts the rows of a refilled batch into TRL's table of completions.

    Args:
        logs: the table, with the further rows of all ranks.
        before: what :func:`take_logged` gave, with as many rows of each rank as the refilled batch.
        rows: int64 ``[ranks, rows]``, from :func:`rows_of`: a rank's earlier rows come first, then its further ones.
        more: how many further rows each rank has.
    """
    ranks, count = rows.shape
    for name, column in _columns(logs).items():
        both = [_by_rank(before.get(name, []), ranks, count), _by_rank(list(column), ranks, more)]
        if column or before.get(name):  # else TRL does not use it
            column.clear()
            column.extend((both[0][rank] + both[1][rank])[row] for rank in range(ranks) for row in rows[rank].tolist())


def _columns(logs: dict[str, Any]) -> dict[tuple[str, str], deque[Any]]:
    """The columns of TRL's table. Those of rewards, and of what a reward function logs, are in nested tables."""
    tables = {name: {name: part} if isinstance(part, deque) else part for name, part in logs.items()}
    return {(table, name): column for table, columns in tables.items() for name, column in columns.items()}


def _by_rank(values: list[Any], ranks: int, count: int) -> list[list[Any]]:
    """Splits values by rank, with None for missing ones: TRL may hold only a column's latest rows, or none."""
    values = [None] * (ranks * count - len(values)) + values
    return [values[rank * count : (rank + 1) * count] for rank in range(ranks)]
