"""The supports of rows, in plain PyTorch: the logits of a support are gathered.

Terms are rounded to integers and added as integers, so that sums do not depend on the order of terms or on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, SupportArguments, Tile
from .softmax_state import LOWEST

_UNIT = 2.0**36  # terms are at most 1, and are rounded to multiples of 1 / _UNIT: a sum of 2^27 terms fits in int64
_AT_ONCE = 1 << 21  # the number of ids that are processed at a time; their temporaries take about 200 MB


class Supports(NamedTuple):
    """The supports of all rows: the support of row i is ids[offsets[i]:offsets[i + 1]]."""

    ids: Tensor
    offsets: Tensor  # int64
    bad: Tensor  # 0-d: whether the offsets are invalid (possible only on a GPU); then no id belongs to a row
    include_label: bool

    @classmethod
    def of(cls, supports: SupportArguments) -> Supports:
        ids, offsets, include_label = supports
        bad = (offsets[0] != 0) | (offsets[1:] < offsets[:-1]).any() | (offsets[-1] > len(ids))
        return cls(ids, offsets.long(), bad, include_label)

    def empty(self) -> Tensor:
        """Returns for each row whether it has no support."""
        return (self.offsets.diff() == 0) & ~self.bad

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yields the ids piece by piece, as four tensors: the row of each id, the id, whether the id belongs to a row
        (if not, the first tensor has an arbitrary row), and the index of the id among all ids.
        """
        rows = len(self.offsets) - 1
        for begin in range(0, len(self.ids) if rows else 0, _AT_ONCE):
            ids = self.ids[begin : begin + _AT_ONCE].long()
            place = torch.arange(begin, begin + len(ids), device=ids.device)
            row = torch.searchsorted(self.offsets[1:], place, right=True)
            # Ids that belong to no row are spread over all rows, where they add 0. If they all went to one row, a GPU
            # would serialise the additions.
            yield torch.where(row < rows, row, place % rows), ids, (row < rows) & ~self.bad, place


class Sets(NamedTuple):
    """Five flags for each row about the row's set, which has the ids of the row and, maybe, the label. Each tensor is
    bool [rows].
    """

    has_label: Tensor  # the label is in the set
    label_joins: Tensor  # the label is in the set but not among the ids
    single: Tensor  # the set has only one id, and the logit of this id is not read
    bad: Tensor  # an id of the row is invalid, or the offsets are; the row's results are then NaN
    dense: Tensor  # the row has no support, so the set has all ids

    @classmethod
    def of(cls, supports: Supports, targets: Tensor, tile: Tile, tokens: int) -> Sets:
        vocabulary = tokens if tile == ALL_TOKENS else 1 << 31  # the size is unknown if there are other tiles
        times, bad = (torch.zeros_like(targets, dtype=torch.int32) for _ in range(2))
        for row, ids, used, _ in supports.pieces():
            times.index_add_(0, row, (used & (ids == targets[row])).int())
            bad.index_add_(0, row, (used & ((ids < 0) | (ids >= vocabulary))).int())
        sizes, wrong = supports.offsets.diff(), (bad > 0) | supports.bad
        is_token = (targets >= 0) & (targets < vocabulary)
        joins = (times == 0) & is_token & (sizes > 0) & supports.include_label
        single = (sizes + joins.long() == 1) & ~wrong
        return cls((times > 0) | joins, joins, single, wrong, supports.empty())


class SupportRows(NamedTuple):
    """A tile of logits with the supports of its rows."""

    supports: Supports
    sets: Sets
    logits: Tensor
    targets: Tensor
    tile: Tile
    mask: Tensor | None
    tokens: int  # number of ids in the tile
    listed: bool  # whether `logits` has only support logits: first a logit for each id, then for each row's label

    @classmethod
    def of(
        cls,
        supports: SupportArguments,
        logits: Tensor,
        targets: Tensor,
        tile: Tile,
        mask: Tensor | None,
        support_of: int | None = None,
    ) -> SupportRows:
        """With ``support_of``, ``logits`` is a list of the support logits of a tile of ``support_of`` ids."""
        of_rows = Supports.of(supports)
        tokens = logits.shape[-1] if support_of is None else support_of
        sets = Sets.of(of_rows, targets, tile, tokens)
        flat = None if mask is None else mask.reshape(-1)
        return cls(of_rows, sets, logits, targets, tile, flat, tokens, support_of is not None)

    def support_logits(
        self, and_single: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Yields the support logits piece by piece, as five tensors: row, id, index in the logits, logit, and whether
        the logit is read. Labels that join their row's set come last. The logit of a set of one id is read only if
        ``and_single`` is true for the row.
        """
        single = self.sets.single if and_single is None else self.sets.single & ~and_single
        counts = ~(single | self.sets.bad | self.sets.dense)
        if self.mask is not None:
            counts &= self.mask
        rows = torch.arange(len(self.targets), device=self.targets.device)
        labels = rows, self.targets, self.sets.label_joins, len(self.supports.ids) + rows
        for row, ids, used, place_of_id in chain(self.supports.pieces(), [labels]):
            column = self.tile.column(ids)
            read = used & counts[row] & (column >= 0) & (column < self.tokens)
            place = place_of_id if self.listed else column
            yield row, ids, place, self._gathered(row, place, read), read

    def label_logits(self) -> tuple[Tensor, Tensor]:
        """Returns the logit of each row's label, and whether the logit is read. A logit is read if the label is in the
        tile and in the row's set, and is not the only id of the set.
        """
        place = self.tile.column(self.targets)
        read = self.sets.has_label & ~self.sets.single & (place >= 0) & (place < self.tokens)
        rows = torch.arange(len(self.targets), device=self.targets.device)
        if self.listed:  # the index of the label's id, or the extra index if the label is not among the ids
            place = rows + len(self.supports.ids)
            for row, ids, used, place_of_id in self.supports.pieces():
                is_label = used & (ids == self.targets[row])
                place.scatter_reduce_(0, row, torch.where(is_label, place_of_id, place[row]), "amin")
        return self._gathered(rows, place, read), read

    def _gathered(self, row: Tensor, place: Tensor, read: Tensor) -> Tensor:
        if self.logits.shape[-1] == 0:
            return torch.full(row.shape, -math.inf, device=row.device)
        return self.logits[(*self._of_rows(row), place.where(read, 0))].float().masked_fill(~read, -math.inf)

    def _of_rows(self, row: Tensor) -> tuple[Tensor, ...]:
        """Converts row indices to an index tensor for each leading dimension: flattening the logits may need a copy."""
        place: list[Tensor] = []
        for size in reversed(self.logits.shape[1:-1]):
            place.insert(0, row % size)
            row = row // size
        return (row, *place) if self.logits.dim() > 1 else ()

    def states(self, temperature: Tensor) -> Tensor:
        """Returns the state (m, S, T) of each row's support logits, float32 [3, rows]. Rows without a support have
        the initial state.
        """
        top = torch.full_like(temperature, LOWEST)
        for row, _, _, z, read in self.support_logits():
            top.scatter_reduce_(0, row, torch.where(read, z, LOWEST), "amax")
        units = torch.zeros(len(top), 3, dtype=torch.int64, device=top.device)
        for row, _, _, z, _ in self.support_logits():
            distance = (z - top[row]) / temperature[row]
            e = distance.exp()
            no_number = ~(z < math.inf)  # NaN or +inf
            terms = torch.stack([e, torch.where(e > 0, distance * e, 0), no_number], 1)
            units.index_add_(0, row, terms.nan_to_num().mul(_UNIT).round().long())
        total, dot, no_numbers = (units.double() / _UNIT).float().unbind(1)
        undefined = (no_numbers > 0) | temperature.isnan() | self.sets.bad
        return torch.stack([top, total, (dot * temperature).masked_fill(undefined, math.nan)])
