"""Divides the rows of a batch into micro-batches of equal work, so that little padding is computed."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._arguments.checks import no_tensor
from .._collectives import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class MicroBatch(NamedTuple):
    """Rows that are forwarded together, and the columns that they need."""

    rows: Tensor
    """int64 ``[n]``, on the device of the lengths: indices of this process's rows, the rows with the most work
    first.
    """
    width: int
    """The number of columns: the largest of these rows' lengths, rounded up."""
    prompt_width: int
    """The number of columns for prompts, computed in the same way; 0 without lengths of prompts."""

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
    """Divides rows into micro-batches of equal work, so that little padding is computed.

    A forward of n rows computes ``n * width`` positions, where the width is the length of the longest row. So rows are
    ordered by length, and divided into consecutive parts, such that the largest part has as few positions as possible.
    To find these parts, a bound on the positions of a part is bisected: each part takes as many rows as the bound
    allows, and the result has the smallest bound for which ``number`` parts are enough.

    Parts of long rows have few rows, and parts of short rows have many. So if your loss is a mean over the rows of a
    micro-batch, weight it by the number of its rows. Work is counted in positions, not in time, although the time of
    attention grows with the square of a row's length.

    Args:
        lengths: integers ``[rows]``, of at least 0: the number of columns that each row needs. If prompts are padded
            on the left and completions on the right, these are the lengths of the completions.
        number: the number of micro-batches. None: as few as ``max_positions`` allows.
        max_positions: the largest number of positions of a micro-batch, instead of ``number``.
        prompt_lengths: integers ``[rows]``, the lengths of prompts that are padded on the left. A micro-batch then has
            ``prompt_width + width`` columns. Rows are ordered by completion or by total length, whichever has the
            smaller bound.
        multiple_of: both widths are rounded up to a multiple of this number.
        process_group: the ranks, if each rank divides its own rows. Every rank has to call with the same number of
            rows, and gets the same number of micro-batches. The k-th micro-batch has the same number of rows on every
            rank, and about the same number of positions, so that ranks do not wait long for each other. There are two
            collectives.

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
    given = {"lengths": lengths} | ({} if prompt_lengths is None else {"prompt_lengths": prompt_lengths})
    for name, values in given.items():
        _require_lengths(name, values, lengths)
    own = torch.stack([values.to(lengths.device, torch.int64) for values in given.values()])
    everyones, rank = _of_all_ranks(own, process_group)  # [ranks, 1 or 2, rows]
    for place, name in enumerate(given):
        if len(lengths) and (least := int(everyones[:, place].amin())) < 0:
            raise ValueError(f"{name}: got {least}; takes numbers of at least 0")
    if number is not None and number > len(lengths):
        raise ValueError(f"number: got {number} for {len(lengths)} rows; takes at most one micro-batch for each row")
    if len(lengths) == 0:
        return []
    keys = [everyones[:, 0]] if prompt_lengths is None else [everyones[:, 0], everyones.sum(dim=1)]
    everyones = (everyones + multiple_of - 1) // multiple_of * multiple_of
    orders = [_Order(everyones, key) for key in keys]
    if max_positions is not None:
        if (most := int(everyones.sum(dim=1).amax())) > max_positions:
            raise ValueError(f"max_positions: got {max_positions}; takes at least {most}, which one row needs")
        number = min(len(order.ends(max_positions)) for order in orders)
    assert number is not None
    bounds = [order.smallest_bound(number) for order in orders]
    best = bounds.index(min(bounds))
    parts = []
    for rows in orders[best].rows[rank].tensor_split(orders[best].ends_of_parts(number, bounds[best])[:-1]):
        widths = everyones[rank][:, rows].amax(dim=1).tolist()
        parts.append(MicroBatch(rows.to(lengths.device), widths[0], 0 if prompt_lengths is None else widths[1]))
    return parts


def _require_lengths(name: str, values: Tensor, lengths: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise no_tensor(name, values, "a tensor of integers")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {values.dtype}; takes integers")
    if values.dim() != 1 or len(values) != len(lengths):
        takes = "[rows]" if values is lengths else f"that of lengths, {list(lengths.shape)}"
        raise ValueError(f"{name}: got shape {list(values.shape)}; takes {takes}")


def _of_all_ranks(own: Tensor, process_group: ProcessGroup | DeviceMesh | None) -> tuple[Tensor, int]:
    """Returns the lengths of all ranks, on the CPU, and the rank of this process."""
    if process_group is None:
        return own.unsqueeze(0).cpu(), 0
    ranks = ranks_of(process_group)
    counts = ranks.gather_number(own.shape[1], own).tolist()
    if len(set(counts)) > 1:
        raise ValueError(f"lengths: got {counts} rows on the ranks; takes the same number on all ranks")
    return ranks.gather(own).cpu(), ranks.rank


class _Order:
    """Each rank's rows, in the descending order of a key, and the ways to divide them into consecutive parts. All ranks
    divide at the same places. So the k-th row of every rank counts with the length of the longest k-th row of all
    ranks.
    """

    def __init__(self, lengths: Tensor, key: Tensor) -> None:
        """``lengths``, ``[ranks, 1 or 2, rows]``, has each rank's widths of completions, and of prompts if any."""
        self.rows = key.argsort(dim=1, descending=True, stable=True)
        widest = lengths.gather(2, self.rows.unsqueeze(1).expand_as(lengths)).amax(dim=0).tolist()
        self._widths: list[int] = widest[0]
        self._prompts: list[int] = widest[1] if len(widest) > 1 else [0] * len(widest[0])

    def ends(self, bound: int) -> list[int]:
        """Returns where each part ends if it takes as many rows as the bound on its positions allows, but at least one
        row.
        """
        ends, begin, width, prompt = [], 0, 0, 0
        for place, (own_width, own_prompt) in enumerate(zip(self._widths, self._prompts, strict=True)):
            width, prompt = max(width, own_width), max(prompt, own_prompt)
            if (place + 1 - begin) * (width + prompt) > bound and place > begin:
                ends.append(place)
                begin, width, prompt = place, own_width, own_prompt
        return [*ends, len(self._widths)]

    def smallest_bound(self, number: int) -> int:
        most = len(self._widths) * (max(self._widths) + max(self._prompts))
        return bisect_left(range(most + 1), True, key=lambda bound: len(self.ends(bound)) <= number)

    def ends_of_parts(self, number: int, bound: int) -> list[int]:
        """Returns where each of exactly ``number`` parts ends. If the bound needs fewer parts, the largest part is
        divided in two, as often as necessary.
        """
        ends = self.ends(bound)
        parts = [(-self._positions(begin, end)[-1], begin, end) for begin, end in pairwise([0, *ends])]
        heapify(parts)
        while len(ends) < number:
            _, begin, end = heappop(parts)
            if end - begin == 1:
                continue
            before, after = self._positions(begin, end), self._positions(end - 1, begin - 1, -1)[::-1]
            cuts = range(1, end - begin)
            cut = begin + min(cuts, key=lambda cut: (max(before[cut - 1], after[cut]), before[cut - 1] + after[cut]))
            ends.append(cut)
            for half in ((begin, cut), (cut, end)):
                heappush(parts, (-self._positions(*half)[-1], *half))
        return sorted(ends)

    def _positions(self, first: int, end: int, step: int = 1) -> list[int]:
        """Returns the positions of the first row alone, of the first two rows, and so on."""
        places = range(first, end, step)
        widths = accumulate((self._widths[place] for place in places), max)
        prompts = accumulate((self._prompts[place] for place in places), max)
        return [count * (width + prompt) for count, (width, prompt) in enumerate(zip(widths, prompts, strict=True), 1)]
