"""The pairs of a row and a token that was kept for it, from a sampling mask: the LM head computes these alone.

Everything is as long as the mask's ids, or as the rows. Nothing waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .products import Head

if TYPE_CHECKING:
    from .problem import HeadProblem

_op = torch.ops.d3s_kernels
NO_TARGET = -100


class _Spans(NamedTuple):
    """The ids of all rows, those of a row side by side."""

    row: Tensor  # int64 [pairs]; any row for an id of none
    token: Tensor  # int64 [pairs], of the whole vocabulary
    used: Tensor  # bool [pairs]: whether the id belongs to a row
    offsets: Tensor  # int64 [rows + 1]
    bad: Tensor  # bool, 0-d: offsets on a GPU may be unchecked, and these are bad; then all spans count as empty

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor) -> _Spans:
        rows, offsets = len(offsets) - 1, offsets.long()
        ids = ids if rows else ids[:0]
        good = _are_good(offsets, ids)
        offsets = torch.where(good, offsets, 0)
        place = torch.arange(len(ids), device=ids.device)
        row = torch.searchsorted(offsets[1:], place, right=True)
        return cls(torch.where(row < rows, row, place % max(1, rows)), ids.long(), row < rows, offsets, ~good)

    def places_of(self, labels: Tensor) -> Tensor:
        """The pair of each row's label, int64 [rows]; NO_TARGET if its span lacks it."""
        is_label = self.used & (self.token == labels.index_select(0, self.row))
        place = torch.arange(len(self.row), device=labels.device)
        found = torch.full_like(labels, -1).scatter_reduce_(0, self.row, torch.where(is_label, place, -1), "amax")
        return torch.where(found < 0, NO_TARGET, found)

    def with_labels(self, labels: Tensor, joins: Tensor) -> _Spans:
        """With the labels of some rows at the end of these rows' spans."""
        before = joins.cumsum(0) - joins.long()  # labels that join rows above
        pairs, rows = len(self.row), len(labels)
        place = torch.arange(pairs, device=labels.device)
        to = torch.where(self.used, place + before.index_select(0, self.row), place + joins.sum())
        of_label = torch.where(joins, self.offsets[1:] + before, pairs + rows)  # past the end: one that does not join
        row, token = (values.new_zeros(pairs + rows + 1) for values in (self.row, self.token))
        used = torch.zeros_like(row, dtype=torch.bool)
        every = torch.arange(rows, device=labels.device)
        for out, own, label in ((row, self.row, every), (token, self.token, labels), (used, self.used, joins)):
            out.index_copy_(0, to, own).index_copy_(0, of_label, label)
        offsets = self.offsets + torch.cat([before, joins.sum().view(1)])
        return _Spans(row[:-1], token[:-1], used[:-1], offsets, self.bad)


class Kept(NamedTuple):
    """The pairs of the rows that have a span, as the products take them."""

    row: Tensor  # int64 [pairs]
    token: Tensor  # int32 [pairs], in this rank's shard
    real: Tensor  # bool [pairs]: to be computed here
    offsets: Tensor  # int64 [rows + 1]
    label: Tensor  # int64 [rows]: the pair of the row's label, or NO_TARGET
    label_here: Tensor  # the same, if this rank has the label
    counted: Tensor  # bool [rows]: has a span, and the mask keeps the row
    elsewhere: Tensor  # bool [rows]: has one kept token, which is in another shard
    bad: Tensor  # bool [rows]: a bad id, or bad offsets: the results are NaN

    @classmethod
    def of(cls, problem: HeadProblem) -> Kept:
        assert problem.sampling_ids is not None
        assert problem.sampling_offsets is not None
        spans = _Spans.of(problem.sampling_ids, problem.sampling_offsets)
        labels, sizes = problem.labels.reshape(-1).long(), spans.offsets.diff()
        vocabulary = len(problem.weight) if problem.shard.ranks is None else 1 << 31  # a rank does not know its size
        no_token = spans.used & ((spans.token < 0) | (spans.token >= vocabulary))
        bad = torch.zeros_like(labels).index_add_(0, spans.row, no_token.long()) > 0
        bad |= spans.bad
        label = spans.places_of(labels)
        if problem.include_label:
            joins = (label == NO_TARGET) & (labels >= 0) & (labels < vocabulary) & (sizes > 0)
            spans = spans.with_labels(labels, joins)
            label, sizes = spans.places_of(labels), sizes + joins.long()
        counted = (sizes != 0) | spans.bad
        if problem.mask is not None:
            counted &= problem.mask.reshape(-1)
        token = spans.token - problem.shard.first_token
        here = spans.used & (token >= 0) & (token < len(problem.weight))
        real = here & (counted & (sizes > 1)).index_select(0, spans.row)
        label_here = torch.where(_at(here, label), label, NO_TARGET)
        owned = torch.zeros_like(labels).index_add_(0, spans.row, here.long()) > 0
        elsewhere = (sizes == 1) & ~owned
        token = torch.where(real, token, 0).int()
        return cls(spans.row, token, real, spans.offsets, label, label_here, counted, elsewhere, bad)

    def rows(self, some: Tensor | None = None) -> Tensor:
        """The row of each pair, int32; -1 for one that stands for nothing, or whose row is not among ``some``."""
        real = self.real if some is None else self.real & some.index_select(0, self.row)
        return torch.where(real, self.row, -1).int()


def kept_logits(head: Head, kept: Kept, hidden: Tensor) -> Tensor:
    """The logit of each pair, float32; -inf for one that stands for nothing."""
    logits: Tensor = _op.kept_logits.default(hidden, head.weight, kept.rows(), kept.token)
    logits = logits.to(head.logits_dtype)
    if head.bias is not None and len(head.bias):
        logits = logits.add_(head.bias.index_select(0, kept.token))
    if head.softcap is not None:
        logits = logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return torch.where(kept.real, logits.float(), -torch.inf)


def dense_rows(problem: HeadProblem) -> HeadProblem:
    """The rows with an empty span, of which all logits are computed."""
    assert problem.sampling_ids is not None
    assert problem.sampling_offsets is not None
    empty = (problem.sampling_offsets.diff() == 0) & _are_good(problem.sampling_offsets, problem.sampling_ids)
    mask = empty.view(problem.labels.shape)
    mask = mask if problem.mask is None else mask & problem.mask
    return problem._replace(mask=mask, sampling_ids=None, sampling_offsets=None, max_dense_rows=None)


def _are_good(offsets: Tensor, ids: Tensor) -> Tensor:
    """Whether offsets are those of spans, 0-d."""
    return (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] <= len(ids))


def _at(flags: Tensor, places: Tensor) -> Tensor:
    """The flag at each place; False where the place is below 0."""
    if len(flags) == 0:
        return torch.zeros_like(places, dtype=torch.bool)
    return flags.index_select(0, places.clamp(min=0)) & (places >= 0)
