"""Log-probability and entropy over logits when some rows have a support; such a row is computed over its support only.

This module divides the rows and joins the results. The ops over the whole vocabulary compute the dense rows, which have
no support. The ops ``support_*`` of ``csrc/ops`` write the other rows into the same results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import (
    ALL_TOKENS,
    NO_SUPPORTS,
    ONE,
    GradientArguments,
    NumberOrTensor,
    OptionalSupports,
    Tile,
    of_schema,
)
from . import backends, ops
from .faults import look
from .libraries import named
from .registration import (
    Gradient,
    declare,
    new_row_statistics,
    refuse_unreadable,
    register_gradient,
    register_no_second_derivative,
)

_op = torch.ops.d3s_kernels
_PACKED_AT_ONCE = 1 << 25  # the number of logits of packed rows that are processed at a time


def row_statistics(
    logits: Tensor,
    labels: Tensor | None,
    temperature: tuple[float, Tensor | None],
    mask: Tensor | None,
    supports: OptionalSupports,
) -> tuple[Tensor, ...]:
    """Returns the log-probability and the entropy of each row, over its support if it has one; more results may follow
    these two.
    """
    if supports.ids is None:
        results: tuple[Tensor, ...] = ops.logprob_entropy(logits, labels, *temperature, mask)
    else:
        results = support_logprob_entropy(logits, labels, *supports, *temperature, mask)
    return results


# ---- dense rows ------------------------------------------------------------------------------------------------------


class DenseRows(NamedTuple):
    """The rows that are not masked out and have no support."""

    mask: Tensor  # bool [...], one for each row
    bound: int | None  # the caller's bound on the number of these rows

    def packed(self, logits: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]] | None:
        """If plain PyTorch computes the dense ops, returns an iterator over the dense rows, since plain PyTorch would
        also read the logits of masked rows. For any other back-end, returns None. The iterator yields, piece by piece,
        three tensors: row indices, logits ``[n, V]``, and the rows to which results are written. With a bound, there is
        an entry for each row that the bound allows; the results of unused entries go to an extra last row. Without a
        bound, this method causes a host sync.
        """
        if not backends.reads_masked_rows(logits.device.type):
            return None
        rows, columns = self.mask.numel(), logits.shape[-1]
        room = int(self.mask.sum()) if self.bound is None else min(self.bound, rows)
        indices, _ = _op.compact.default(self.mask, room)
        parts = torch.split(indices, max(1, _PACKED_AT_ONCE // max(1, columns))) if room else ()
        return (
            (row, _rows_of(logits, row), torch.where(part < 0, rows, part))
            for part in parts
            for row in (part.clamp(min=0),)
        )


def _rows_of(logits: Tensor, row: Tensor) -> Tensor:
    """Gathers rows ``[n, V]`` with an index for each leading dimension: flattening the logits may need a copy."""
    place: list[Tensor] = []
    rest = row
    for size in reversed(logits.shape[1:-1]):
        place.insert(0, rest % size)
        rest = rest // size
    return logits[(rest, *place)] if logits.dim() > 1 else logits.expand(len(row), -1)


def _picked(values: Tensor | None, row: Tensor) -> Tensor | None:
    return None if values is None else values.reshape(-1).index_select(0, row)


def _temperature_at(temperature: NumberOrTensor, row: Tensor) -> NumberOrTensor:
    return temperature.map_rows(lambda each: each.reshape(-1).index_select(0, row))


# ---- forward ---------------------------------------------------------------------------------------------------------


def _statistics(
    logits: Tensor,
    labels: Tensor | None,
    supports: OptionalSupports = NO_SUPPORTS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the four results of each row, and which rows are dense."""
    required, bound = supports.required, supports.max_dense_rows
    marked, exceeded = _op.support_rows.default(logits, *required[:2], bound, mask)
    dense = DenseRows(marked, bound)
    if supports.may_be_dense:
        results = _of_dense_rows(dense, logits, labels, temperature)
    else:
        results = new_row_statistics(logits)
    _op.support_logprob_entropy_.default(
        *results, logits, labels, *required, *temperature, mask, None if bound is None else exceeded
    )
    return *results, marked


def _of_dense_rows(
    dense: DenseRows, logits: Tensor, labels: Tensor | None, temperature: NumberOrTensor
) -> tuple[Tensor, ...]:
    """Returns the results of the dense rows. The values for other rows are not used."""
    packed = dense.packed(logits)
    if packed is None:
        results: tuple[Tensor, ...] = _op.logprob_entropy.default(logits, labels, *temperature, dense.mask)
        return results
    count, shape = dense.mask.numel(), dense.mask.shape
    room = tuple(logits.new_empty(count + 1, dtype=torch.float32) for _ in range(4))
    for row, part, to in packed:
        found = _op.logprob_entropy.default(part, _picked(labels, row), *_temperature_at(temperature, row))
        for out, values in zip(room, found, strict=True):
            out.index_copy_(0, to, values)
    return tuple(out[:count].view(shape) for out in room)


def merge_tile_(
    state: Tensor,
    logits: Tensor,
    labels: Tensor,
    tile: Tile,
    temperature: NumberOrTensor,
    mask: Tensor | None,
    supports: OptionalSupports,
) -> Tensor:
    """Merges a tile into the rows' softmax states. If a row has a support, only the logits of the support are merged.
    Returns which rows are dense.
    """
    required, bound = supports.required, supports.max_dense_rows
    marked, exceeded = _op.support_rows.default(logits, *required[:2], bound, mask)
    packed = DenseRows(marked, bound).packed(logits) if supports.may_be_dense else ()
    if packed is None:
        _op.softmax_state_.default(state, logits, labels, *tile, *temperature, marked)
    elif supports.may_be_dense:
        room = torch.cat([state, state.new_empty(1, 4)])
        for row, part, to in packed:
            of_rows = room.index_select(0, row)
            _op.softmax_state_.default(of_rows, part, _picked(labels, row), *tile, *_temperature_at(temperature, row))
            room.index_copy_(0, to, of_rows)
        state.copy_(room[:-1])
    _op.support_softmax_state_.default(
        state, logits, labels, *required, *tile, *temperature, mask, None if bound is None else exceeded
    )
    return marked


# ---- backward --------------------------------------------------------------------------------------------------------


def _gradient(
    given: GradientArguments,
    dense: Tensor,
    supports: OptionalSupports = NO_SUPPORTS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
) -> Tensor:
    """Returns the gradient of the logits. The dense op writes zeros to the rows with a support. If there are more dense
    rows than the bound, the statistics are NaN, and so are the gradients of all rows.
    """
    packed = DenseRows(dense, supports.max_dense_rows).packed(given.logits)
    if packed is None:
        gradient: Tensor = _op.logprob_entropy_backward.default(*given, *temperature, dense, *tile)
    else:
        gradient = _of_packed_rows(packed, dense, given, temperature, tile)
    _op.support_logprob_entropy_backward_.default(*given, gradient, *supports.required, *temperature, mask, *tile)
    return gradient


def _of_packed_rows(
    packed: Iterator[tuple[Tensor, Tensor, Tensor]],
    dense: Tensor,
    given: GradientArguments,
    temperature: NumberOrTensor,
    tile: Tile,
) -> Tensor:
    grad_logprob, grad_entropy, logits, labels, *statistics = given
    count, columns = statistics[0].numel(), logits.shape[-1]
    active = torch.zeros_like(dense) if grad_entropy is None else grad_entropy != 0
    if grad_logprob is not None and labels is not None:
        active |= (grad_logprob != 0) & (labels != -100)
    # If there are more dense rows than the bound, some are not packed, and the statistics of all rows are NaN.
    undefined = (active & dense & statistics[-1].isnan()).view(count, 1)
    room = logits.new_empty(count + 1, columns)
    room[:count] = torch.where(undefined, torch.nan, 0.0)
    for row, part, to in packed:
        incoming = (_picked(grad, row) for grad in (grad_logprob, grad_entropy))
        of_rows = (_picked(values, row) for values in (labels, *statistics))
        found = _op.logprob_entropy_backward.default(
            *incoming, part, *of_rows, *_temperature_at(temperature, row), None, *tile
        )
        room.index_copy_(0, to, found)
    return room[:count].view(logits.shape)


# ---- the ops ---------------------------------------------------------------------------------------------------------

# The arguments of OptionalSupports.
SUPPORTS = "Tensor support_ids, Tensor support_offsets, bool include_label=False, SymInt? max_dense_rows=None, "
TEMPERATURE_AND_MASK = "float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None"
STATISTICS = "(Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum, Tensor dense)"
_forward, _backward = of_schema(_statistics), of_schema(_gradient)


def _looked_at(*arguments: Any) -> tuple[Tensor, ...]:
    if not arguments[0].is_cpu:  # on a CPU, the ops themselves check the values
        look("support_logprob_entropy", named("support_logprob_entropy", arguments))
    results: tuple[Tensor, ...] = _forward(*arguments)
    return results


def fake_statistics(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return *new_row_statistics(logits), logits.new_empty(logits.shape[:-1], dtype=torch.bool)


declare(
    f"support_logprob_entropy(Tensor logits, Tensor? labels, {SUPPORTS}{TEMPERATURE_AND_MASK}) -> {STATISTICS}",
    _looked_at,
    fake_statistics,
)
declare(
    "support_logprob_entropy_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    f"Tensor entropy, Tensor row_max, Tensor log_sum, Tensor dense, {SUPPORTS}{TEMPERATURE_AND_MASK}, "
    "SymInt? first_token=None) -> (Tensor grad_logits)",
    _backward,
    lambda grad_logprob, grad_entropy, logits, *_: logits.new_empty(logits.shape),
)
register_gradient("support_logprob_entropy", Gradient("support_logprob_entropy", "support_logprob_entropy_backward"))
register_no_second_derivative("support_logprob_entropy_backward")
refuse_unreadable("support_logprob_entropy")

support_logprob_entropy = ops.function_of("support_logprob_entropy")
