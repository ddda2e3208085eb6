"""Divides the rows of a batch into micro-batches of equal work, so that little of what is computed is padding."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._groups import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class MicroBatch(NamedTuple):
    """Rows that are forwarded together, and the columns that they need."""

    rows: Tensor
    """int64 ``[n]``, on the device of the lengths: indices of this process's rows, those of most work first."""
    width: int
    """The number of columns: the largest of these rows' lengths, rounded up."""
    prompt_width: int
    """The same for the lengths of prompts; 0 if there are none."""

    @property
    def positions(self) -> int:
        """The number of positions that a forward of these rows computes, padding included."""
        return len(self.rows) * (self.prompt_width + self.width)


def micro_batches(
    lengths: Tensor,
    number: int | None = None,
    *,
    max_positions: int | None = None,
    prompt_lengths: Tensor | None = None,
    multiple_of: int = 1,
    process_group: ProcessGroup | DeviceMesh | None = None,
) -> list[MicroBatch]:
    """Divides rows into micro-batches, so that the largest one has as few positions as possible.

    A forward of n rows computes ``n * width`` positions, where the width is the length of the longest row. The rest of
    the other rows is padding. So rows are ordered by length and divided into consecutive parts, from the longest to the
    shortest. A bound on a part's positions needs the fewest parts if each part takes rows as long as the bound allows.
    The result has the smallest bound that ``number`` parts can meet; it is found by bisection. Parts of long rows have
    few rows, and parts of short rows have many. A mean over the rows of a micro-batch therefore has to be weighted by
    the number of its rows.

    The positions are compared, not the time: attention grows with the square of a row's length.

    Args:
        lengths: integers ``[rows]``, of at least 0: the number of columns that each row needs. If prompts are padded
            on the left and completions on the right, these are the lengths of the completions.
        number: the number of micro-batches. None: as few as ``max_positions`` allows.
        max_positions: the largest number of positions of a micro-batch, in place of ``number``.
        prompt_lengths: integers ``[rows]``, the lengths of prompts that are padded on the left. A micro-batch then has
            ``prompt_width + width`` columns. Rows are ordered by completion or by total length, whichever has the
            smaller bound.
        multiple_of: both widths are rounded up to a multiple of this number.
        process_group: divide the rows of all ranks, each rank its own. Every rank has to call with the same number of
            rows, and gets the same number of micro-batches. The k-th micro-batch has as many rows on every rank, and
            about as many positions, so that ranks that wait for each other wait little. There are two collectives.

    Returns:
        The micro-batches, the longest rows first. Every micro-batch has at least one row. The same lengths always give
        the same result; rows of the same length stay in their order.

    Raises:
        ValueError: lengths of another shape, or below 0; both or none of ``number`` and ``max_positions``; more
            micro-batches than rows; a row that needs more than ``max_positions``; ranks with different numbers of rows.
        TypeError: lengths that are no integers.

    The host waits for the lengths if they are on a GPU.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> lengths = torch.tensor([90, 500, 100, 130, 480, 110])
        >>> for part in d3s.micro_batches(lengths, 3):
        ...     print(part.rows.tolist(), part.width, part.positions)
        [1] 500 500
        [4] 480 480
        [3, 5, 2, 0] 130 520
        >>> sum(part.positions for part in d3s.micro_batches(lengths, 3)), lengths.numel() * 500  # instead of
        (1500, 3000)
    """
    if (number is None) == (max_positions is None):
        raise ValueError(f"number: got {number} with max_positions {max_positions}; takes exactly one of the two")
    for name, value in {"number": number, "max_positions": max_positions, "multiple_of": multiple_of}.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: got {value!r}; takes a whole number of at least 1")
    both = [_checked("lengths", lengths)]
    if prompt_lengths is not None:
        both.append(_checked("prompt_lengths", prompt_lengths, len(lengths)))
    table = torch.stack([values.to(lengths.device, torch.int64) for values in both])
    everyones, rank = table.unsqueeze(0), 0
    if process_group is not None:
        ranks = ranks_of(process_group)
        counts = ranks.gather_number(len(lengths), lengths).tolist()
        if len(set(counts)) > 1:
            raise ValueError(f"lengths: got {counts} rows on the ranks; takes the same number on all ranks")
        everyones, rank = ranks.gather(table), ranks.rank
    everyones = everyones.cpu()
    if everyones.numel() and int(everyones.amin()) < 0:
        raise ValueError(f"lengths: got {int(everyones.amin())}; takes numbers of at least 0, also for prompts")
    if len(lengths) == 0 and number is None:
        return []
    keys = [everyones[:, 0]] if prompt_lengths is None else [everyones[:, 0], everyones.sum(dim=1)]
    orders = [key.argsort(dim=1, descending=True, stable=True) for key in keys]
    candidates = [_Ordered(everyones, order, multiple_of) for order in orders]
    if number is None:
        longest = max(candidates[0].positions(row, row + 1) for row in range(len(lengths)))
        if longest > (most := max_positions or 0):
            raise ValueError(f"max_positions: got {max_positions}; takes at least {longest}, which one row needs")
        number = min(len(candidate.ends(most)) for candidate in candidates)
    elif number > len(lengths):
        raise ValueError(f"number: got {number} for {len(lengths)} rows; takes at most one micro-batch for each row")
    bounds = [candidate.smallest_bound(number) for candidate in candidates]
    best = bounds.index(min(bounds))
    parts = []
    for rows in orders[best][rank].tensor_split(candidates[best].ends_of_parts(number, bounds[best])[:-1]):
        width, *prompt = [_rounded(length, multiple_of) for length in everyones[rank][:, rows].amax(dim=1).tolist()]
        parts.append(MicroBatch(rows.to(lengths.device), width, sum(prompt)))
    return parts


def _rounded(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _checked(name: str, values: Tensor, rows: int | None = None) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: got {type(values).__name__}; takes a tensor of integers")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {values.dtype}; takes integers")
    if values.dim() != 1 or rows not in (None, len(values)):
        takes = "[rows]" if rows is None else f"that of lengths, [{rows}]"
        raise ValueError(f"{name}: got shape {list(values.shape)}; takes {takes}")
    return values


class _Ordered:
    """Rows in one order. A rank's k-th row counts as long as the longest k-th row of any rank."""

    def __init__(self, lengths: Tensor, order: Tensor, multiple_of: int) -> None:
        """``lengths``, ``[ranks, 1 or 2, rows]``, has each rank's lengths of completions, and of prompts if any.
        ``order``, ``[ranks, rows]``, has the order of each rank's rows.
        """
        sorted_lengths = lengths.gather(2, order.unsqueeze(1).expand_as(lengths))
        longest = sorted_lengths.amax(dim=0).t().tolist()
        self._rows = [[_rounded(length, multiple_of) for length in row] for row in longest]

    def positions(self, begin: int, end: int) -> int:
        return (end - begin) * sum(map(max, zip(*self._rows[begin:end], strict=True)))

    def ends(self, bound: int) -> list[int]:
        """Returns where each part ends if each takes as many rows as ``bound`` allows, and at least one row."""
        ends, begin, widths = [], 0, self._rows[0]
        for place, row in enumerate(self._rows):
            wider = list(map(max, widths, row))
            if place > begin and (place + 1 - begin) * sum(wider) > bound:
                ends.append(place)
                begin, wider = place, row
            widths = wider
        return [*ends, len(self._rows)]

    def smallest_bound(self, number: int) -> int:
        bounds = range(max(map(sum, self._rows)), self.positions(0, len(self._rows)) + 1)
        return bounds[bisect_left(bounds, True, key=lambda bound: len(self.ends(bound)) <= number)]

    def ends_of_parts(self, number: int, bound: int) -> list[int]:
        """Returns where each of exactly ``number`` parts ends. If the bound needs fewer parts, the part that gains most
        is divided again.
        """
        ends = self.ends(bound)
        while len(ends) < number:
            begins = [0, *ends]
            _, cut = max(
                (self.positions(begin, end) - self.positions(begin, cut) - self.positions(cut, end), -cut)
                for begin, end in zip(begins, ends, strict=False)
                for cut in range(begin + 1, end)
            )
            ends = sorted([*ends, -cut])
        return ends
