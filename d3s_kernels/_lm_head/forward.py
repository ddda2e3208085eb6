"""The forward of the LM head. It merges one tile of logits at a time into the rows' softmax states. Then it drops the
tile, unless the tile is kept for the backward.

A row's result is bitwise equal to the result of an op on all logits of the row. For a row with a support, only the
logits of the support are computed. A host sync occurs only if the host needs a number of rows for which the caller
gives no bound.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NO_SUPPORTS, NumberOrTensor
from .._dispatch.registration import new_row_statistics
from .problem import HeadProblem, Shard
from .products import Head, without_autocast
from .tiles import kept_logits, new_room_for_logits, tiles_of_logits

_op = torch.ops.d3s_kernels


# ---- some of the rows -----------------------------------------------------------------------------------------------


class HostNumber:
    """An asynchronous copy of one integer, or of a tensor of integers, to the host. ``value`` waits for the work that
    was started before the copy, and for no work that was started later. On devices other than CUDA's, ``value`` makes
    the copy, and waits for all work.
    """

    def __init__(self, number: Tensor) -> None:
        self._copy, self._done = number, None
        if number.is_cuda:
            pinned = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._copy, self._done = pinned.copy_(number, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(number.device))

    def value(self) -> Any:
        """Returns the number, or a list of the numbers."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.long().tolist()


class Picked(NamedTuple):
    """Some of the rows, packed in order. If the caller gives a bound on the number of rows, there is no host sync."""

    indices: Tensor  # [room]: row indices; 0 in the unused slots at the end
    past: Tensor | None  # bool [room]: whether a slot is unused; None if the unused slots are cut off
    exceeded: Tensor | None  # bool [1]: whether there are more rows than the bound; None if there is no bound
    number: HostNumber | None = None  # without a bound, the number of rows, until `cut`

    @classmethod
    def where(cls, mask: Tensor, bound: int | None, other_exceeded: Tensor | None = None) -> Picked:
        """Picks the rows that the mask marks. ``other_exceeded`` says whether another bound of the same call was
        exceeded; if so, this bound counts as exceeded too.
        """
        indices, count = _op.compact.default(mask, mask.numel() if bound is None else min(bound, mask.numel()))
        other = None if other_exceeded is None else other_exceeded.view(1)
        if bound is None:
            return cls(indices.clamp(min=0), None, other, HostNumber(count.view(())))
        return cls(indices.clamp(min=0), indices < 0, count > bound if other is None else (count > bound) | other)

    def cut(self) -> Picked:
        """Waits for the number of rows if there is no bound, and cuts off the unused slots. All small values of rows
        are gathered before, with unused slots, so that a GPU has work while the host waits and continues.
        """
        return self if self.number is None else self._replace(indices=self.indices[: self.number.value()], number=None)

    def gather(self, values: Tensor, dim: int = 0, past: float = 0) -> Tensor:
        """Returns the ``values`` of the picked rows. The index of an unused slot is 0, but row 0 may have a NaN, which
        must not reach a product. So unused slots are filled with ``past``.
        """
        packed = values.index_select(dim, self.indices)
        if self.past is None:
            return packed
        return packed.masked_fill_(self.past if dim == values.dim() - 1 else self.past.unsqueeze(1), past)

    def temperature(self, problem: HeadProblem) -> NumberOrTensor:
        return problem.flat_temperature.map_rows(lambda each: self.gather(each, past=1))  # a temperature is above 0

    def scatter(self, values: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
        """Writes ``values`` back to their rows, and 0 to other rows. If the bound is exceeded, all results are NaN."""
        # The values of unused slots are written to an extra row at the end.
        places = self.indices if self.past is None else self.indices.masked_fill(self.past, rows)
        outs = (each.new_zeros((rows + 1, *each.shape[1:])).index_copy_(0, places, each)[:rows] for each in values)
        return tuple(map(self.poison_, outs))

    def poison_(self, values: Tensor) -> Tensor:
        return values if self.exceeded is None else values.masked_fill_(self.exceeded, torch.nan)


class PackedRows(NamedTuple):
    """The rows that a problem's mask keeps."""

    picked: Picked | None  # None: all rows
    hidden: Tensor  # [rows, H]
    temperature: NumberOrTensor
    values: list[Tensor]  # other values of the rows

    @classmethod
    def of(cls, problem: HeadProblem, *values: Tensor) -> PackedRows | None:
        """Packs the rows, also of ``values``. Returns None if the host knows that there are more rows than
        ``max_rows``.
        """
        count, mask, bound = problem.rows, problem.mask, problem.max_rows
        hidden = problem.hidden.reshape(count, problem.hidden.shape[-1])
        if mask is None:
            exceeded = bound is not None and count > bound
            return None if exceeded else cls(None, hidden, problem.flat_temperature, list(values))
        picked = Picked.where(mask.reshape(count), bound)
        packed, temperature = [picked.gather(each) for each in values], picked.temperature(problem)
        picked = picked.cut()
        used = itemgetter(slice(len(picked.indices)))
        return cls(picked, picked.gather(hidden), temperature.map_rows(used), [used(each) for each in packed])

    def scatter(self, values: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
        return values if self.picked is None else self.picked.scatter(values, rows)


# ---- rows with a support. Support logits are one logit for each id, then one logit for each row's label. -------------


def flat(values: Tensor, rows: int) -> Tensor:
    return values if values.dim() == 1 else values.reshape(rows)


def flat_rows(problem: HeadProblem) -> HeadProblem:
    """Returns the same problem with hidden states ``[rows, H]``, and with labels, mask and temperature ``[rows]``. In
    the result, hidden states and weight have a stride of 1 between columns.
    """

    def in_rows(matrix: Tensor) -> Tensor:
        return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()

    hidden, count, mask = problem.hidden, problem.rows, problem.mask
    return problem._replace(
        hidden=in_rows(hidden if hidden.dim() == 2 else hidden.reshape(count, hidden.shape[-1])),
        weight=in_rows(problem.weight),
        labels=flat(problem.labels, count),
        temperature=problem.flat_temperature,
        mask=None if mask is None else flat(mask, count),
    )


def support_logits(rows: HeadProblem) -> Tensor:
    """Computes the support logits of a problem from :func:`flat_rows`. The result is expanded to
    ``[rows, support logits]``, so that all rows share the same memory.
    """
    tile_start, mask, supports = rows.shard.tile_start, rows.mask, rows.supports.required
    logits = Head.of(rows).support_logits(rows.hidden, rows.labels, supports, mask, tile_start)
    return logits.expand(rows.rows, -1)


def dense_rows(problem: HeadProblem) -> tuple[HeadProblem, Tensor | None]:
    """Returns the problem restricted to the dense rows, which have a logit for every id. Also returns a bool tensor
    ``[1]``: whether the number of dense rows exceeds its bound; or None if it cannot exceed the bound.
    """
    ids, offsets, _, most_dense = problem.supports
    mask, exceeded = _op.support_rows.default(problem.hidden, ids, offsets, most_dense, problem.mask)

    def smaller(*bounds: int | None) -> int | None:
        return min((bound for bound in bounds if bound is not None), default=None)

    dense = problem._replace(
        mask=mask,
        max_rows=smaller(problem.max_rows, most_dense),
        max_grad_rows=smaller(problem.max_grad_rows, most_dense),
        supports=NO_SUPPORTS,
    )
    return dense, None if most_dense is None or most_dense >= problem.rows else exceeded


# ---- the forward -----------------------------------------------------------------------------------------------------


def no_logits(rows: int, like: Tensor) -> Tensor:
    """Returns the softmax states ``[rows, 4]`` of rows to which no logits have been added. In the states, the label's
    logit is NaN; it stays NaN if the label is no id of the vocabulary.
    """
    state = like.new_zeros((rows, 4), dtype=torch.float32)
    state.select(1, 0).fill_(torch.finfo(torch.float32).min)
    state.select(1, 3).fill_(torch.nan)
    return state


def finished(
    shard: Shard, state: Tensor, labels: Tensor, mask: Tensor | None, temperature: NumberOrTensor
) -> tuple[Tensor, ...]:
    """Computes the results of rows from the states of all shards. The log-probability is 0 for a row without a label.
    All results are 0 where the mask is False.
    """
    outputs: tuple[Tensor, ...] = _op.softmax_state_finish.default(shard.everyones(state), *temperature)
    outputs[0].masked_fill_(labels == -100, 0.0)
    if mask is not None:
        for output in outputs:
            output.masked_fill_(~mask, 0.0)
    return outputs


def forward(problem: HeadProblem) -> tuple[Tensor, ...]:
    """Returns the statistics of the rows, and the memory of the kept logits."""
    problem.check()
    room = new_room_for_logits(problem)
    if not problem.supports.given:
        try:
            return *_of_all_tokens(problem, kept_logits(problem, room)), room
        except RuntimeError:
            problem.require_memory()
            raise
    problem.require_memory()
    outputs = _over_supports(problem)
    if problem.max_rows is not None and problem.mask is not None:
        exceeded = problem.mask.sum() > problem.max_rows
        outputs = tuple(output.masked_fill(exceeded, torch.nan) for output in outputs)
    elif problem.max_rows is not None and problem.rows > problem.max_rows:  # the host knows the number of rows
        outputs = tuple(torch.full_like(output, torch.nan) for output in outputs)
    return *outputs, room


@without_autocast
def _over_supports(problem: HeadProblem) -> tuple[Tensor, ...]:
    """Computes the outputs of the dense rows and of the rows with a support, and joins them."""
    dense, exceeded = dense_rows(problem)
    rows, may_be_dense = flat_rows(problem), problem.supports.may_be_dense
    labels, temperature, mask, supports = rows.labels, rows.temperature, rows.mask, rows.supports.required
    support_of = len(rows.weight)
    if rows.shard.ranks is None:
        outputs = _of_all_tokens(dense) if may_be_dense else new_row_statistics(problem.hidden)
        flat_outputs = [output.view(rows.rows) for output in outputs]
        _op.support_logprob_entropy_.default(
            *flat_outputs, support_logits(rows), labels, *supports, *temperature, mask, exceeded, support_of
        )
        return outputs
    # One collective gathers the states of all rows. Below, the outputs of dense rows are replaced by outputs that are
    # computed separately.
    state, tile_start = no_logits(rows.rows, rows.hidden), rows.shard.tile_start
    _op.support_softmax_state_.default(
        state, support_logits(rows), labels, *supports, tile_start, *temperature, mask, exceeded, support_of
    )
    of_supports = finished(rows.shard, state, labels, mask, temperature)
    outputs = tuple(output.view(problem.labels.shape) for output in of_supports)
    if may_be_dense:
        assert dense.mask is not None
        outputs = tuple(torch.where(dense.mask, *both) for both in zip(_of_all_tokens(dense), outputs, strict=True))
        outputs[0].masked_fill_(problem.labels == -100, 0.0)  # 0 even if there are more dense rows than the bound
    return outputs


@without_autocast
def _of_all_tokens(problem: HeadProblem, kept: Tensor | None = None) -> tuple[Tensor, ...]:
    count, shape = problem.rows, problem.labels.shape
    state = no_logits(count, problem.hidden)
    rows = PackedRows.of(problem, problem.labels.reshape(count))
    if rows is None:
        return tuple(problem.hidden.new_full(shape, torch.nan, dtype=torch.float32) for _ in range(4))
    (targets,), temperature = rows.values, rows.temperature
    state = state[: len(targets)]
    for r, first, logits in tiles_of_logits(problem, rows.hidden, kept):
        _op.softmax_state_.default(state[r], logits, targets[r], first, *temperature.map_rows(itemgetter(r)))
    outputs = rows.scatter(finished(problem.shard, state, targets, None, temperature), count)
    return tuple(output.view(shape) for output in outputs)
