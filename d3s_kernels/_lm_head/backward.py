"""The backward of the LM head. It recomputes each tile of logits that was not kept, writes the tile's gradient, and
multiplies the gradient with the weight and with the hidden states.

Rows whose gradient is 0 are skipped. If the vocabulary is sharded, each rank works on its own shard, and the ranks sum
their gradients of the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NumberOrTensor
from .._arguments.checks import is_known
from .forward import Picked, dense_rows, flat, flat_rows, support_logits
from .problem import HeadProblem
from .products import Head, PartialSums, add_product, without_autocast, zero_behind_rows_
from .tiles import Tiles, whole_vectors

_op = torch.ops.d3s_kernels

_STRIP = 4 << 20  # the number of logits in a strip: enough to keep a GPU busy, but with little extra memory


class Incoming(NamedTuple):
    """The inputs of the backward that have one value for each row: incoming gradients and the forward's statistics."""

    grad_logprob: Tensor | None
    grad_entropy: Tensor | None
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor

    def poisoned(self, bad: Tensor, both: bool) -> Incoming:
        """If ``bad`` is true, replaces incoming gradients with NaN: both gradients if ``both`` is True, otherwise one
        of them. One NaN is enough to make a row's whole gradient NaN.
        """
        grad_logprob, grad_entropy = self.grad_logprob, self.grad_entropy
        if grad_logprob is not None and (both or grad_entropy is None):
            grad_logprob = grad_logprob.masked_fill(bad, torch.nan)
        if grad_entropy is not None:
            grad_entropy = grad_entropy.masked_fill(bad, torch.nan)
        return self._replace(grad_logprob=grad_logprob, grad_entropy=grad_entropy)

    def map(self, change: Callable[[Tensor], Tensor]) -> Incoming:
        return Incoming(*(None if values is None else change(values) for values in self))  # type: ignore[arg-type]


INPUTS = ("hidden", "weight", "bias")  # the arguments that have a gradient


class Wanted(NamedTuple):
    """Flags for the gradients to compute, and an optional tensor to which the weight's gradient is added."""

    hidden: bool
    weight: bool
    bias: bool
    weight_grad_into: Tensor | None = None


@without_autocast
def backward(
    problem: HeadProblem,
    incoming: Incoming,
    wanted: Wanted,
    weight_grad_into: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of hidden states, weight and bias. A gradient that is not wanted is an empty tensor. With
    ``weight_grad_into``, the weight's gradient is added to that tensor, and an empty tensor is returned. The problem
    must have been checked. ``kept`` has the forward's kept logits.
    """
    wanted = wanted._replace(weight_grad_into=weight_grad_into)
    if problem.supports.offsets is None:
        active = _rows_with_gradient(problem, incoming)
        return of_active_rows(problem, incoming, active, wanted, kept=kept)
    dense, dense_exceeded = dense_rows(problem)
    may_be_dense = problem.supports.may_be_dense
    exceeded = _any_exceeded(problem, incoming, dense_exceeded)
    if exceeded is not None:
        incoming = incoming.poisoned(exceeded, both=may_be_dense)
    if may_be_dense:
        gradients = of_active_rows(dense, incoming, _rows_with_gradient(dense, incoming), wanted, exceeded=exceeded)
    else:
        gradients = _filled(problem, wanted, exceeded)
    return _with_supports(problem, incoming, wanted, gradients, exceeded)


def _any_exceeded(problem: HeadProblem, incoming: Incoming, dense_exceeded: Tensor | None) -> Tensor | None:
    """Returns a 0-d flag: whether the number of rows with a gradient, or the number of dense rows, exceeds its bound.
    Returns None if the host already knows that neither bound is exceeded.
    """
    bound, rows = problem.max_grad_rows, problem.rows
    flags = [] if dense_exceeded is None else [dense_exceeded.view(())]
    if bound is not None and bound < rows:
        active = _rows_with_gradient(problem, incoming)
        flags.append(active.any() if bound == 0 else active.sum() > bound)
    if not flags:
        return None
    any_exceeded = flags[0] if len(flags) == 1 else flags[0] | flags[1]
    return None if _host_knows(any_exceeded) and not any_exceeded else any_exceeded


def _host_knows(flag: Tensor) -> bool:
    """Returns whether the host can read the flag without a host sync. A fake tensor in a trace has no value."""
    return type(flag) is Tensor and is_known(flag)


def _filled(problem: HeadProblem, wanted: Wanted, bad: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients filled with 0, or with NaN if ``bad`` is true. Each gradient is written only once, even if the
    host does not know the value of ``bad``.
    """

    def filled(like: Tensor, wanted: bool, bad: Tensor | None, *shape: int) -> Tensor:
        if not wanted:
            return like.new_empty(0)
        if bad is None:
            return like.new_zeros(shape)
        if _host_knows(bad):
            return like.new_full(shape, torch.nan)
        # A GPU copies 8-byte elements twice as fast as 2-byte elements.
        number, elements = like.new_zeros(()).masked_fill_(bad, torch.nan), math.prod(shape)
        room = number.new_empty(whole_vectors(elements, number.dtype))
        room.view(torch.int64).copy_(number.repeat(8 // number.itemsize).view(torch.int64))
        return room[:elements].view(shape)

    hidden, weight = problem.hidden, problem.weight
    # On a GPU, the gradient of the hidden states is filled with 0 here, since a fill with a value that the host does
    # not know takes twice as long. If ``bad`` is true, support_hidden_grad_ fills the gradient with NaN later.
    of_rows = bad if bad is not None and _host_knows(bad) else None
    return (
        filled(hidden, wanted.hidden, of_rows, *hidden.shape),
        filled(weight, wanted.weight and wanted.weight_grad_into is None, bad, *weight.shape),
        filled(weight, wanted.bias, bad, len(weight)),
    )


def _with_supports(
    problem: HeadProblem,
    incoming: Incoming,
    wanted: Wanted,
    gradients: tuple[Tensor, Tensor, Tensor],
    exceeded: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the terms of rows that have a support to ``gradients``, which already has the terms of all other rows."""
    problem, (grad_hidden, grad_weight, grad_bias) = flat_rows(problem), gradients
    hidden, weight, mask, shard, supports = (
        problem.hidden, problem.weight, problem.mask, problem.shard, problem.supports,
    )  # fmt: skip
    offsets = supports.offsets
    assert offsets is not None
    incoming = incoming.map(lambda values: flat(values, problem.rows))
    with torch._C._AutoDispatchBelowAutograd():  # skips the autograd kernel: Python code that only refuses gradients
        grad, rows, tokens, undefined = _op.support_logits_backward.default(
            incoming.grad_logprob, incoming.grad_entropy, support_logits(problem), problem.labels, incoming.entropy,
            incoming.row_max, incoming.log_sum, len(weight), *supports.required, *problem.temperature,
            Head.of(problem).softcap, mask, shard.tile_start,
        )  # fmt: skip
    if exceeded is not None:
        undefined.logical_or_(exceeded)
    if wanted.hidden:
        out = grad_hidden.view(hidden.shape)
        total = out if shard.ranks is None else torch.zeros_like(out, dtype=torch.float32)
        _op.support_hidden_grad_.default(grad, weight, rows, tokens, offsets, undefined, total)
        if total is not out:
            total = shard.total_(total).to(hidden.dtype)
            has_support = (offsets.diff() != 0).logical_or_(undefined).unsqueeze(1)
            grad_hidden = torch.where(has_support, total, out).view(grad_hidden.shape)
    if wanted.weight or wanted.bias:
        of_weight = grad_weight if wanted.weight_grad_into is None else wanted.weight_grad_into
        if not wanted.weight:
            hidden, of_weight = hidden[:, :0], weight.new_empty((weight.shape[0], 0))
        of_bias = grad_bias if wanted.bias else None
        _op.support_weight_grad_.default(grad, hidden, rows, tokens, of_weight, of_bias)
    return grad_hidden, grad_weight, grad_bias


def of_active_rows(
    problem: HeadProblem,
    incoming: Incoming,
    active: Tensor,
    wanted: Wanted,
    tokens: AtTokens | None = None,
    exceeded: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients, which only the rows in the mask ``active`` contribute to. With ``tokens``, the gradient of
    the logits at some ids is replaced. ``kept`` has the forward's kept logits.
    """
    head, shard = Head.of(problem), problem.shard
    if wanted.hidden:  # rows of this gradient are summed over the ranks, so all ranks must pick the same rows
        active = shard.anyones_(active)
    picked = Picked.where(active, problem.max_grad_rows, exceeded)
    picked, rows = _Rows.gathered(picked, problem, incoming, tokens, kept)
    grad_rows, grad_weight, grad_bias = _sum_over_tiles(problem, head, rows, wanted)
    if not len(rows.hidden):  # without tiles, the NaN of an exceeded bound has not reached these gradients
        picked.poison_(grad_weight)
        picked.poison_(grad_bias)
        if wanted.weight and wanted.weight_grad_into is not None:
            picked.poison_(wanted.weight_grad_into)
    # The shards' gradients mostly cancel in the sum. If they were rounded before the sum, the error would grow with the
    # number of ranks.
    grad_hidden = shard.total_(grad_rows).to(problem.hidden.dtype)
    if wanted.hidden:
        grad_hidden = picked.scatter((grad_hidden,), problem.rows)[0].view(problem.hidden.shape)
    return grad_hidden, grad_weight, grad_bias


def _rows_with_gradient(problem: HeadProblem, incoming: Incoming) -> Tensor:
    grad_logprob, grad_entropy, labels, mask, count = *incoming[:2], problem.labels, problem.mask, problem.rows
    active = None
    if grad_logprob is not None:
        active = (flat(grad_logprob, count) != 0).logical_and_(flat(labels, count) != -100)
    if grad_entropy is not None:
        other = flat(grad_entropy, count) != 0
        active = other if active is None else active.logical_or_(other)
    if active is None:
        active = torch.zeros(count, dtype=torch.bool, device=labels.device)
    return active if mask is None else active.logical_and_(flat(mask, count))


class AtTokens(NamedTuple):
    """The gradients of the logits at some ids of each row, with which the gradient of a tile is overwritten."""

    token_ids: Tensor  # [rows, K]; -1 stands for no id
    labels: Tensor  # [rows]; -100 stands for no label
    values: Tensor  # [rows, K + 1]: the gradients at the ids, and at the label

    def gathered(self, picked: Picked) -> AtTokens:
        values = picked.poison_(picked.gather(self.values))
        return AtTokens(picked.gather(self.token_ids), picked.gather(self.labels), values)


class KeptRows(NamedTuple):
    """The kept logits of packed rows."""

    logits: Tensor  # [rows of the forward, ids]: the logits of the first ids
    rows: Tensor  # [packed rows]: the row of `logits` that each packed row has
    past: Tensor | None  # as in Picked

    @classmethod
    def gathered(cls, logits: Tensor, picked: Picked, problem: HeadProblem) -> KeptRows:
        if problem.mask is None:
            return cls(logits, picked.indices, picked.past)
        # The forward has packed the rows that the mask keeps. With more rows than max_rows, all results are NaN.
        places = flat(problem.mask, problem.rows).cumsum(0).sub_(1).clamp_(0, len(logits) - 1)
        return cls(logits, places.index_select(0, picked.indices), picked.past)

    def at(self, place: slice) -> KeptRows:
        return KeptRows(self.logits, self.rows[place], None if self.past is None else self.past[place])

    def gather(self, tokens: slice, out: Tensor) -> None:
        """Writes the logits of these ids to ``out``. Unused slots get 0, since their row's logits may be NaN."""
        torch.index_select(self.logits[:, tokens], 0, self.rows, out=out)
        if self.past is not None:
            out.masked_fill_(self.past.unsqueeze(1), 0)


class _Rows(NamedTuple):
    """The packed rows that have a gradient: either all of these rows, or only the rows of one tile."""

    hidden: Tensor
    targets: Tensor
    incoming: Incoming
    temperature: NumberOrTensor
    tokens: AtTokens | None
    kept: KeptRows | None

    @classmethod
    def gathered(
        cls, picked: Picked, problem: HeadProblem, incoming: Incoming, tokens: AtTokens | None, kept: Tensor | None
    ) -> tuple[Picked, _Rows]:
        """Gathers the values of the picked rows. Returns the picked rows without unused slots, and their values."""
        count, hidden = problem.rows, problem.hidden.reshape(problem.rows, problem.hidden.shape[-1])
        targets = picked.gather(flat(problem.labels, count))
        # One op gathers all these values, since launching an op costs more than moving so few values.
        parts = [flat(values, count) for values in incoming if values is not None]
        together = picked.gather(torch.stack(parts), dim=1)
        # If a bound is exceeded, the incoming gradients become NaN here, and so does everything that is computed from
        # these rows. This costs less than a pass over the weight's gradient.
        picked.poison_(together[: len(parts) - 3])
        part = iter(together.unbind())
        packed_incoming = incoming.map(lambda _: next(part))
        checked = tokens is None and problem.shard.ranks is None
        if packed_incoming.grad_logprob is not None and checked and not hidden.is_cpu:
            # Labels on a GPU are not checked. A label that is no id of the vocabulary gives NaN.
            packed_incoming.grad_logprob.masked_fill_(targets >= problem.weight.shape[0], torch.nan)
        at_ids = None if tokens is None else tokens.gathered(picked)
        of_kept = None if kept is None else KeptRows.gathered(kept, picked, problem)
        rows = cls(hidden, targets, packed_incoming, picked.temperature(problem), at_ids, of_kept)
        picked = picked.cut()
        return picked, rows.at(slice(0, len(picked.indices)))._replace(hidden=picked.gather(hidden))

    def at(self, place: slice) -> _Rows:
        if place.start == 0 and place.stop == self.targets.shape[0]:  # in most cases one tile has all rows
            return self
        incoming = self.incoming.map(lambda values: values[place])
        tokens = None if self.tokens is None else AtTokens(*(values[place] for values in self.tokens))
        kept = None if self.kept is None else self.kept.at(place)
        temperature = self.temperature.map_rows(itemgetter(place))
        return _Rows(self.hidden[place], self.targets[place], incoming, temperature, tokens, kept)


class Gradients:
    """The sums to which the tiles add their gradients. Memory is allocated only for the wanted gradients.

    If the rows are cut into several tiles, several tiles add to the same part of the weight's gradient. Their terms are
    summed in float32: in the weight's gradient itself if its dtype is float32, otherwise in a float32 buffer for the
    ids of one tile.
    """

    def __init__(self, rows: Tensor, head: Head, tiles: Tiles, wanted: Wanted) -> None:
        self._head, self._into, weight = head, wanted.weight_grad_into, head.weight
        # If there are no tiles, nothing is written to the gradients, so they must start as 0.
        fresh = rows.new_empty if rows.numel() and weight.numel() else rows.new_zeros
        self._hidden = PartialSums(fresh((tiles.parts, *rows.shape), dtype=torch.float32)) if wanted.hidden else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if wanted.bias else None
        self._weight = self._into if wanted.weight else None
        if wanted.weight and self._into is None:
            self._weight = fresh(weight.shape)
        self._slab: Tensor | None = None
        if self._weight is not None and len(rows) > tiles.row_step and self._weight.dtype != torch.float32:
            self._slab = weight.new_empty((tiles.token_step, weight.shape[1]), dtype=torch.float32)

    def add(self, tile: Tensor, rows: Tensor, place: slice, tokens: slice) -> None:
        """Adds the gradients from one tile. All tiles of a slab, which have the same ids, must be added one after the
        other, in row order.
        """
        if self._bias is not None:
            self._bias[tokens].add_(tile.sum(0, dtype=torch.float32))
        if self._hidden is not None:
            self._hidden.add(place, tile, self._head.weight[tokens], first=tokens.start == 0)
        if self._slab is not None:
            add_product(self._slab[: tile.shape[1]], tile.t(), rows, first=place.start == 0)
        elif self._weight is not None:
            add_product(self._weight[tokens], tile.t(), rows, first=place.start == 0 and self._into is None)

    def finish(self, tokens: slice) -> None:
        """Writes one slab of the weight's gradient. All tiles of the slab must have been added."""
        if self._slab is None or self._weight is None:
            return
        total = self._slab[: tokens.stop - tokens.start]
        if self._into is None:
            self._weight[tokens] = total
        else:
            self._weight[tokens].add_(total)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradient of the rows in float32, and the gradients of weight and bias in the weight's dtype. An
        empty tensor is returned for a gradient that is not wanted or was added to the caller's tensor.
        """
        weight = self._head.weight
        return (
            weight.new_empty(0, dtype=torch.float32) if self._hidden is None else self._hidden.total(),
            weight.new_empty(0) if self._weight is None or self._into is not None else self._weight,
            weight.new_empty(0) if self._bias is None else self._bias.to(weight.dtype),
        )


def _sum_over_tiles(problem: HeadProblem, head: Head, rows: _Rows, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    tiles = Tiles.cut(rows.hidden, problem, rows.kept.logits.shape[1] if rows.kept else 0, sums=wanted.hidden)
    gradients = Gradients(rows.hidden, head, tiles, wanted)
    # The outer loop is over slabs, so that the gradient of a slab is complete after the inner loop.
    for tokens in tiles.token_slices():
        for place in tiles.row_slices():
            tile = _gradient_of_tile(problem, head, rows.at(place), tokens, tiles.room(place, tokens))
            gradients.add(tile, rows.hidden[place], place, tokens)
        gradients.finish(tokens)
    return gradients.results()


def _gradient_of_tile(problem: HeadProblem, head: Head, rows: _Rows, tokens: slice, room: Tensor) -> Tensor:
    """Computes a tile's logits in ``room``, and overwrites them with their gradient. A gradient in a narrower dtype
    fills only the front part of each row. Kept logits are read from where they are.
    """
    cap, first = head.softcap, problem.shard.token(tokens.start)
    all_kept = rows.kept if rows.kept is not None and tokens.stop <= rows.kept.logits.shape[1] else None
    if all_kept is None:
        head.logits(rows.hidden, tokens, room)
    whole = room.view(head.gradient_dtype)[:, : room.shape[1]]
    # The slope of a soft cap needs extra memory, so with a soft cap the tile is processed in strips.
    step = max(1, len(room) if cap is None else _STRIP // max(1, room.shape[1]))
    for begin in range(0, len(room), step):
        strip = slice(begin, begin + step)
        logits, gradient, part = room[strip], whole[strip], rows.at(strip)
        (grad_logprob, grad_entropy, *statistics), slope = part.incoming, None
        kept = None if all_kept is None else all_kept.at(strip)
        if kept is not None and cap is None:
            _op.logprob_entropy_backward_rows_.default(
                grad_logprob, grad_entropy, kept.logits[:, tokens], part.targets, *statistics, kept.rows, gradient,
                first, *part.temperature,
            )  # fmt: skip
        else:
            if kept is not None:
                kept.gather(tokens, logits)
            slope = None if cap is None else logits.div(cap).square_().neg_().add_(1)
            _op.logprob_entropy_backward_.default(
                grad_logprob, grad_entropy, logits, part.targets, *statistics, first,
                *part.temperature, gradient.dtype if slope is None else None,
            )  # fmt: skip
        if part.tokens is not None:
            token_ids, labels, values = part.tokens
            to = gradient if slope is None else logits
            _op.put_token_gradients_.default(to, token_ids, labels, values, first)
        if slope is not None:
            gradient.copy_(slope.mul_(logits))
    zero_behind_rows_(whole)
    return whole
