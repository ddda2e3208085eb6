"""plan_rows, exchange_rows: kept rows moved between ranks until every rank has the same number of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import require_flag, require_tensors
from .._groups import ranks_of
from .agreement import agree


class RowPlan(NamedTuple):
    """Which rows move where, as one rank sees it. Rows are those of :func:`plan_rows`'s mask, and their order stays."""

    staying: Tensor
    """int64 ``[n]``, on the mask's device: the rows that stay on this rank, ascending."""
    leaving: Tensor
    """int64 ``[m]``, likewise: the rows that leave it, for the first of their destinations first."""
    send_counts: list[int]
    """For each rank, how many rows it gets from this one."""
    receive_counts: list[int]
    """For each rank, how many rows this one gets from it."""
    rows: int
    """How many every rank has in the end."""
    moved: int
    """How many leave their rank, of all ranks."""
    planned: int
    """How many rows, kept or not, this rank has before."""


@torch.no_grad()
def plan_rows(mask: Tensor, process_group: dist.ProcessGroup | DeviceMesh, *, drop_last: bool = False) -> RowPlan:
    """Which of the kept rows move to which rank, so that every rank ends with the same number of them.

    As few move as can: a rank that has too many keeps its first ones, and the rest goes to those that have too few, in
    rank order on both sides. :func:`exchange_rows` then moves them.

    No variance is lost. Of the rollouts that ``select_rollouts`` keeps, half of those of 8 prompts of 16 on each of 64
    ranks, 12.5 % had to move with 0-1 rewards and 3.5 % with normal ones (``python -m benchmarks.equal_rows``).

    One round, of 8 bytes from each rank. The host waits for the device: what all_to_all_single is to move it has to
    know.

    Args:
        mask: bool ``[rows]``: which of this rank's rows are kept. Ranks may have different numbers of rows, or none.
        process_group: the ranks: a ``torch.distributed`` process group, or a device mesh of one dimension.
        drop_last: where the ranks' number does not divide that of the kept rows, leave out the last rows that are too
            many: of the last rank first.

    Returns:
        :class:`RowPlan`.

    Raises:
        ValueError, TypeError: a mask of another shape or dtype; on all ranks alike: kept rows that cannot be divided,
            without ``drop_last``.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import plan_rows
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> plan = plan_rows(torch.tensor([True, False, True]), dist.group.WORLD)
        >>> plan.staying, plan.rows, plan.moved
        (tensor([0, 2]), 2, 0)
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(process_group)

    def check() -> None:
        require_tensors(mask=mask)
        if mask.dim() != 1 or mask.dtype != torch.bool:
            raise ValueError(f"mask: got shape {list(mask.shape)} of {mask.dtype}; takes bool [rows]")
        require_flag(drop_last=drop_last)

    agree(ranks, "plan_rows", check, lambda _: {"drop_last": drop_last})
    kept = mask.nonzero().flatten()
    held: list[int] = ranks.gather_number(len(kept), mask).tolist()
    rows, too_many = divmod(sum(held), ranks.size)
    if too_many and not drop_last:
        raise ValueError(
            f"mask: {sum(held)} rows are kept on {ranks.size} ranks; takes a multiple of the ranks, or drop_last=True"
        )
    taken = _without_last(held, too_many)
    sent = _moves(taken, rows)
    here = min(taken[ranks.rank], rows)
    return RowPlan(
        kept[:here],
        kept[here : taken[ranks.rank]],
        sent[ranks.rank],
        [row[ranks.rank] for row in sent],
        rows,
        sum(map(sum, sent)),
        len(mask),
    )


def _without_last(held: list[int], too_many: int) -> list[int]:
    taken = list(held)
    for rank in reversed(range(len(taken))):
        dropped = min(too_many, taken[rank])
        taken[rank] -= dropped
        too_many -= dropped
    return taken


def _moves(held: list[int], rows: int) -> list[list[int]]:
    """How many go from each rank to each. What is too many and what is missing are laid side by side, both in rank
    order: those that meet are sender and receiver."""
    leaving = [0, *accumulate(max(number - rows, 0) for number in held)]
    missing = [0, *accumulate(max(rows - number, 0) for number in held)]

    def meet(sender: int, receiver: int) -> int:
        first = max(leaving[sender], missing[receiver])
        return max(min(leaving[sender + 1], missing[receiver + 1]) - first, 0)

    return [[meet(sender, receiver) for receiver in range(len(held))] for sender in range(len(held))]


@overload
def exchange_rows(values: Tensor, plan: RowPlan, process_group: dist.ProcessGroup | DeviceMesh) -> Tensor: ...
@overload
def exchange_rows(
    values: Mapping[str, Tensor], plan: RowPlan, process_group: dist.ProcessGroup | DeviceMesh
) -> dict[str, Tensor]: ...
@torch.no_grad()
def exchange_rows(
    values: Tensor | Mapping[str, Tensor], plan: RowPlan, process_group: dist.ProcessGroup | DeviceMesh
) -> Tensor | dict[str, Tensor]:
    """Moves rows between ranks as :func:`plan_rows` planned it, by one all-to-all.

    Where no row moves there is none. A row costs its bytes, and only rows that move are sent. No gradient.

    Args:
        values: ``[rows, ...]``, of any dtype, with a row for each of the mask that was planned for; or a dict of such
            tensors, which travel together. Dtypes, shapes of a row and names are the same on all ranks.
        plan: what :func:`plan_rows` returned on this rank.
        process_group: the one that it was planned for.

    Returns:
        ``[plan.rows, ...]``: this rank's rows that stay, then those it got, in rank order; a dict of them for a dict.

    Raises:
        ValueError, TypeError: a tensor with another number of rows than was planned for, or on another device; another
            process group than was planned for.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import exchange_rows, plan_rows
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> plan = plan_rows(torch.tensor([True, False, True]), dist.group.WORLD)
        >>> exchange_rows(torch.tensor([[1, 2], [3, 4], [5, 6]]), plan, dist.group.WORLD)
        tensor([[1, 2],
                [5, 6]])
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(process_group)
    columns = {"values": values} if isinstance(values, Tensor) else values

    def check() -> None:
        if not isinstance(columns, Mapping):
            raise TypeError(f"values: got {type(values).__name__}; takes a tensor or a dict of tensors")
        if not isinstance(plan, RowPlan):
            raise TypeError(f"plan: got {type(plan).__name__}; takes what plan_rows returns")
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                raise TypeError(f"{name}: got {type(column).__name__}; takes a tensor")
            if column.device != plan.staying.device:
                raise ValueError(f"{name}: is on {column.device}; takes a tensor on the plan's, {plan.staying.device}")
            if column.dim() < 1 or len(column) != plan.planned:
                raise ValueError(
                    f"{name}: got shape {list(column.shape)}; takes a row for each of the {plan.planned} planned for"
                )
        if len(plan.send_counts) != ranks.size:
            raise ValueError(
                f"process_group: got one of {ranks.size} ranks; takes that of the plan, of {len(plan.send_counts)}"
            )

    def alike(_: object) -> dict[str, Any]:
        return {
            "values": {name: f"{columns[name].dtype} {['*', *columns[name].shape[1:]]}" for name in sorted(columns)}
        }

    agree(ranks, "exchange_rows", check, alike)
    names = sorted(columns)
    own = [columns[name] for name in names]
    got = [column[:0] for column in own]
    if plan.moved and own:
        sent = torch.cat([_as_bytes(column[plan.leaving]) for column in own], 1)
        received = sent.new_empty(sum(plan.receive_counts), sent.shape[1])
        dist.all_to_all_single(received, sent, plan.receive_counts, plan.send_counts, group=ranks.group)
        widths = [_bytes_of_a_row(column) for column in own]
        got = [_from_bytes(part, column) for part, column in zip(torch.split(received, widths, 1), own, strict=True)]
    rows = {name: torch.cat([column[plan.staying], new]) for name, column, new in zip(names, own, got, strict=True)}
    return rows["values"] if isinstance(values, Tensor) else {name: rows[name] for name in columns}


def _bytes_of_a_row(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def _as_bytes(rows: Tensor) -> Tensor:
    """uint8 ``[rows, bytes]``: not every backend takes every dtype."""
    return rows.contiguous().view(-1).view(torch.uint8).view(len(rows), _bytes_of_a_row(rows))


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    # Cloned, since a number has to begin where numbers of its size may.
    packed = rows.clone(memory_format=torch.contiguous_format)
    return packed.view(-1).view(like.dtype).view(len(rows), *like.shape[1:])
