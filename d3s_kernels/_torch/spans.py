"""Rows with a sampling mask, in plain PyTorch: kept logits are gathered, and rows with an empty span are packed.

Terms are rounded to integers and added as integers, so that sums do not depend on the order of terms or on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, SamplingArguments, Tile
from .compact import compact
from .softmax_state import LOWEST

_UNIT = 2.0**36  # terms are at most 1, and are rounded to multiples of 1 / _UNIT: a sum of 2^27 terms fits in int64
_KEPT_AT_ONCE = 1 << 21  # the number of kept logits that are processed at a time; their temporaries take about 200 MB
_DENSE_AT_ONCE = 1 << 25  # the number of logits of packed rows that are processed at a time


class Spans(NamedTuple):
    """The spans of all rows: the span of row i is ids[offsets[i]:offsets[i + 1]]."""

    ids: Tensor
    offsets: Tensor  # int64
    bad: Tensor  # 0-d: whether the offsets are invalid (possible only on a GPU); then no id belongs to a row
    include_label: bool
    max_dense_rows: int | None

    @classmethod
    def of(cls, sampling_mask: SamplingArguments) -> Spans | None:
        ids, offsets, include_label, max_dense_rows = sampling_mask
        if ids is None or offsets is None:
            return None
        bad = (offsets[0] != 0) | (offsets[1:] < offsets[:-1]).any() | (offsets[-1] > len(ids))
        return cls(ids, offsets.long(), bad, include_label, max_dense_rows)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yields the ids piece by piece, as four tensors: the row of each id, the id, whether the id belongs to a row
        (if not, the first tensor has an arbitrary row), and the index of the id among all ids.
        """
        rows = len(self.offsets) - 1
        for begin in range(0, len(self.ids) if rows else 0, _KEPT_AT_ONCE):
            ids = self.ids[begin : begin + _KEPT_AT_ONCE].long()
            place = torch.arange(begin, begin + len(ids), device=ids.device)
            row = torch.searchsorted(self.offsets[1:], place, right=True)
            # Ids that belong to no row are spread over all rows, where they add 0. If they all went to one row, a GPU
            # would serialise the additions.
            yield torch.where(row < rows, row, place % rows), ids, (row < rows) & ~self.bad, place


class Sets(NamedTuple):
    """Five flags for each row about its set of kept tokens. Each tensor is bool [rows]."""

    has_label: Tensor  # the label is in the set
    label_joins: Tensor  # the label is in the set but not in the span
    single: Tensor  # the set has only one token, and the logit of this token is not read
    bad: Tensor  # an id of the row is invalid, or the offsets are; the row's results are then NaN
    dense: Tensor  # the span is empty, so the set is all tokens

    @classmethod
    def of(cls, spans: Spans, targets: Tensor, tile: Tile, tokens: int) -> Sets:
        vocabulary = tokens if tile == ALL_TOKENS else 1 << 31  # the size is unknown if there are other tiles
        times, bad = (torch.zeros_like(targets, dtype=torch.int32) for _ in range(2))
        for row, ids, used, _ in spans.pieces():
            times.index_add_(0, row, (used & (ids == targets[row])).int())
            bad.index_add_(0, row, (used & ((ids < 0) | (ids >= vocabulary))).int())
        sizes, wrong = spans.offsets.diff(), (bad > 0) | spans.bad
        is_token = (targets >= 0) & (targets < vocabulary)
        joins = (times == 0) & is_token & (sizes > 0) & spans.include_label
        single = (sizes + joins.long() == 1) & ~wrong
        return cls((times > 0) | joins, joins, single, wrong, (sizes == 0) & ~spans.bad)


class SpanRows(NamedTuple):
    """A tile of logits with the spans of its rows."""

    spans: Spans
    sets: Sets
    logits: Tensor
    targets: Tensor
    tile: Tile
    mask: Tensor | None
    tokens: int  # number of tokens in the tile
    kept_alone: bool  # whether `logits` has only kept logits: first a logit for each id, then for each row's label

    @classmethod
    def of(
        cls,
        sampling_mask: SamplingArguments,
        logits: Tensor,
        targets: Tensor,
        tile: Tile,
        mask: Tensor | None,
        kept_of: int | None = None,
    ) -> SpanRows | None:
        """Returns None without a sampling mask. With ``kept_of``, ``logits`` has only the kept logits of a tile of
        ``kept_of`` tokens.
        """
        spans = Spans.of(sampling_mask)
        if spans is None:
            return None
        tokens = logits.shape[-1] if kept_of is None else kept_of
        sets = Sets.of(spans, targets, tile, tokens)
        flat = None if mask is None else mask.reshape(-1)
        return cls(spans, sets, logits, targets, tile, flat, tokens, kept_of is not None)

    def kept_logits(self, and_single: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Yields the kept logits piece by piece, as five tensors: row, token, index in the logits, logit, and whether
        the logit is read. Labels that join their row's span come last. The logit of a row's only kept token is read
        only if ``and_single`` is true for the row.
        """
        single = self.sets.single if and_single is None else self.sets.single & ~and_single
        counts = ~(single | self.sets.bad | self.sets.dense)
        if self.mask is not None:
            counts &= self.mask
        rows = torch.arange(len(self.targets), device=self.targets.device)
        labels = rows, self.targets, self.sets.label_joins, len(self.spans.ids) + rows
        for row, ids, used, place_of_id in chain(self.spans.pieces(), [labels]):
            column = self.tile.column(ids)
            read = used & counts[row] & (column >= 0) & (column < self.tokens)
            place = place_of_id if self.kept_alone else column
            yield row, ids, place, self._gathered(row, place, read), read

    def label_logits(self) -> tuple[Tensor, Tensor]:
        """Returns the logit of each row's label, and whether the logit is read. A logit is read if the label is in the
        tile and in the row's set, and is not the only token of the set.
        """
        place = self.tile.column(self.targets)
        read = self.sets.has_label & ~self.sets.single & (place >= 0) & (place < self.tokens)
        rows = torch.arange(len(self.targets), device=self.targets.device)
        if self.kept_alone:  # the index of the label's id, or the extra index if the label is not in the span
            place = rows + len(self.spans.ids)
            for row, ids, used, place_of_id in self.spans.pieces():
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
        """Returns the state (m, S, T) of each row's kept logits, float32 [3, rows]. Rows without a span have the
        initial state.
        """
        top = torch.full_like(temperature, LOWEST)
        for row, _, _, z, read in self.kept_logits():
            top.scatter_reduce_(0, row, torch.where(read, z, LOWEST), "amax")
        units = torch.zeros(len(top), 3, dtype=torch.int64, device=top.device)
        for row, _, _, z, _ in self.kept_logits():
            distance = (z - top[row]) / temperature[row]
            e = distance.exp()
            no_number = ~(z < math.inf)  # NaN or +inf
            terms = torch.stack([e, torch.where(e > 0, distance * e, 0), no_number], 1)
            units.index_add_(0, row, terms.nan_to_num().mul(_UNIT).round().long())
        total, dot, no_numbers = (units.double() / _UNIT).float().unbind(1)
        undefined = (no_numbers > 0) | temperature.isnan() | self.sets.bad
        return torch.stack([top, total, (dot * temperature).masked_fill(undefined, math.nan)])

    def dense_rows(self) -> tuple[Iterator[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Returns an iterator over the unmasked rows with an empty span, and whether their count exceeds
        ``max_dense_rows``. The iterator yields, piece by piece, three tensors: row indices, logits, and the rows to
        which results are written. With ``max_dense_rows``, there are always that many entries; the results of unused
        entries go to an extra last row. Without it, this method causes a host sync.
        """
        dense, bound = self.sets.dense if self.mask is None else self.sets.dense & self.mask, self.spans.max_dense_rows
        count, columns = dense.sum(), self.logits.shape[-1]
        exceeded = torch.zeros_like(count, dtype=torch.bool) if bound is None else count > bound
        if self.kept_alone:
            return iter(()), exceeded
        room = int(count) if bound is None else min(bound, len(dense))
        index, _ = compact(dense, room)
        parts = torch.split(index, max(1, _DENSE_AT_ONCE // max(1, columns))) if room else ()
        packed = (
            (row, self.logits[self._of_rows(row)].view(len(row), columns), torch.where(part < 0, len(dense), part))
            for part in parts
            for row in (part.clamp(min=0),)
        )
        return packed, exceeded
