"""The backward of the LM head: it recomputes each tile of logits, writes its gradient over it, and takes two products.

Only rows whose gradient is not 0 are computed. Where ranks share the vocabulary, each rank does this with its shard,
and the ranks sum their gradients of the hidden states (``shard.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gradients import Gradients, Wanted
from .kept import NO_TARGET, Kept, dense_rows, kept_logits
from .picked import Picked
from .problem import HeadProblem
from .products import Head, without_autocast
from .tiles import Tiles, of_rows

_op = torch.ops.d3s_kernels

_STRIP = 4 << 20  # logits: enough to keep a GPU busy, and little memory


class Incoming(NamedTuple):
    """What comes into the backward, a number for each row: gradients, and the statistics that the forward has found."""

    grad_logprob: Tensor | None
    grad_entropy: Tensor | None
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor

    def with_gradients(self, change: Callable[[Tensor], Tensor]) -> Incoming:
        gradients = (None if grad is None else change(grad) for grad in (self.grad_logprob, self.grad_entropy))
        return Incoming(*gradients, *self[2:])  # type: ignore[call-arg, arg-type]

    def each(self, change: Callable[[Tensor], Tensor]) -> Incoming:
        return Incoming(*(None if values is None else change(values) for values in self))  # type: ignore[arg-type]


def backward_op(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    max_grad_rows: int | None,
    wanted: Sequence[bool],
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    incoming = Incoming(grad_logprob, grad_entropy, entropy, row_max, log_sum)
    return backward(HeadProblem.of(**given), incoming, Wanted(*wanted), max_grad_rows)


@without_autocast
def backward(
    problem: HeadProblem,
    incoming: Incoming,
    wanted: Wanted,
    max_grad_rows: int | None = None,
    weight_grad_into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden states, weight and bias; empty where they are not wanted. The weight's is added to
    ``weight_grad_into`` if that is given, and empty then.
    """
    if problem.sampling_offsets is None:
        return _of_all_tokens(problem, incoming, wanted, max_grad_rows, weight_grad_into)
    exceeded = None if max_grad_rows is None else _rows_with_gradient(problem, incoming).sum() > max_grad_rows
    if exceeded is not None:
        incoming = incoming.with_gradients(lambda grad: grad.masked_fill(exceeded, torch.nan))
    if problem.max_dense_rows == 0:
        gradients = _zeros(problem, wanted, weight_grad_into)
    else:
        bound = min((bound for bound in (max_grad_rows, problem.max_dense_rows) if bound is not None), default=None)
        gradients = _of_all_tokens(dense_rows(problem), incoming, wanted, bound, weight_grad_into)
    gradients = _with_kept_tokens(problem, incoming, wanted, gradients, weight_grad_into)
    if exceeded is not None and (not exceeded.is_cpu or exceeded):
        gradients = tuple(gradient.masked_fill_(exceeded, torch.nan) for gradient in gradients)  # type: ignore[assignment]
    return gradients


def _zeros(problem: HeadProblem, wanted: Wanted, weight_grad_into: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = problem.hidden, problem.weight
    new_weight = wanted.weight and weight_grad_into is None
    return (
        hidden.new_zeros(hidden.shape if wanted.hidden else 0),
        weight.new_zeros(weight.shape if new_weight else 0),
        weight.new_zeros(weight.shape[0] if wanted.bias else 0),
    )


def _with_kept_tokens(
    problem: HeadProblem,
    incoming: Incoming,
    wanted: Wanted,
    gradients: tuple[Tensor, Tensor, Tensor],
    weight_grad_into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the gradients of the rows that have a span to those of the others."""
    head, kept, count = problem.checked_head(), Kept.of(problem), problem.rows
    hidden, (grad_hidden, grad_weight, grad_bias) = problem.hidden.reshape(count, problem.hidden.shape[-1]), gradients
    active = _rows_with_gradient(problem, incoming) & kept.counted
    rows = kept.rows(active)
    grad, undefined = _of_pairs(problem, head, kept, incoming)
    grad = torch.where(rows < 0, 0.0, grad)
    if wanted.hidden:
        tokens = torch.where(rows < 0, -1, kept.token)
        total = problem.shard.total_(_op.kept_hidden_grad.default(grad, problem.weight, tokens, kept.offsets))
        total = torch.where((undefined & active).unsqueeze(1), torch.nan, total).to(hidden.dtype)
        grad_hidden = torch.where(active.unsqueeze(1), total, grad_hidden.view(hidden.shape)).view(problem.hidden.shape)
    if wanted.weight:
        into = grad_weight if weight_grad_into is None else weight_grad_into
        _op.kept_weight_grad_.default(grad, hidden, rows, kept.token, into)
    if wanted.bias:
        ones = hidden.new_ones((count, 1))
        _op.kept_weight_grad_.default(grad, ones, rows, kept.token, grad_bias.view(-1, 1))
    return grad_hidden, grad_weight, grad_bias


def _of_pairs(problem: HeadProblem, head: Head, kept: Kept, incoming: Incoming) -> tuple[Tensor, Tensor]:
    """The gradient of the logit of each pair, float32; and which rows have no gradient but NaN."""
    count, labels = problem.rows, problem.labels.reshape(-1)
    grad_logprob, grad_entropy, entropy, row_max, log_sum = incoming.each(lambda values: values.reshape(count))
    none = torch.zeros_like(entropy)
    of_logprob = none if grad_logprob is None else grad_logprob.masked_fill(labels == -100, 0)
    of_entropy = none if grad_entropy is None else grad_entropy
    outside = (labels != -100) & (kept.label == NO_TARGET) & (of_logprob != 0)
    undefined = outside | (log_sum + of_logprob + of_entropy).isnan()
    tensor = problem.temperatures(None)
    heat = torch.full_like(entropy, problem.temperature) if tensor is None else tensor.expand(count)
    # As GradientLine in csrc/core/softmax_state.h.
    scale = torch.exp(-log_sum) / heat
    offset = -scale * (of_logprob + of_entropy * (entropy - log_sum))
    slope = -scale * of_entropy / heat
    line = torch.stack([row_max.masked_fill(undefined, torch.nan), heat, offset, slope, of_logprob / heat])
    top, heat, offset, slope, at_label = line.index_select(1, kept.row)
    logits = kept_logits(head, kept, problem.hidden.reshape(count, problem.hidden.shape[-1]))
    distance = logits - top
    e = torch.exp(distance / heat)
    grad = torch.where(e > 0, e * (offset + slope * distance), e)  # 0 for a logit of -inf; NaN stays
    place = torch.arange(len(logits), device=logits.device)
    grad = grad + torch.where(place == kept.label.index_select(0, kept.row), at_label, 0)
    if head.softcap is not None:
        grad = grad * (1 - (logits / head.softcap).square())
    return grad, undefined


def _of_all_tokens(
    problem: HeadProblem,
    incoming: Incoming,
    wanted: Wanted,
    max_grad_rows: int | None,
    weight_grad_into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    head, shard = problem.checked_head(), problem.shard
    active = _rows_with_gradient(problem, incoming)
    if wanted.hidden:  # its rows are summed over the ranks, so all ranks must pick the same ones
        active = shard.anyones_(active)
    picked = Picked.where(active, max_grad_rows)
    rows = _Rows.gathered(picked, problem, incoming)
    grad_rows, grad_weight, grad_bias = _sum_over_tiles(problem, head, rows, wanted, weight_grad_into)
    if not len(rows.hidden):  # no tile has carried the NaN of an exceeded bound
        picked.poison_(grad_weight)
        picked.poison_(grad_bias)
        if wanted.weight and weight_grad_into is not None:
            picked.poison_(weight_grad_into)
    # The shards' parts cancel, as those of the tokens do. If they were rounded before the sum, the error would grow
    # with the number of ranks.
    grad_hidden = shard.total_(grad_rows).to(problem.hidden.dtype)
    if wanted.hidden:
        grad_hidden = picked.scatter(grad_hidden, problem.rows).view(problem.hidden.shape)
    return grad_hidden, grad_weight, grad_bias


def _rows_with_gradient(problem: HeadProblem, incoming: Incoming) -> Tensor:
    labels, count = problem.labels.reshape(problem.rows), problem.rows
    active = torch.zeros(count, dtype=torch.bool, device=labels.device)
    if incoming.grad_logprob is not None:
        active |= (incoming.grad_logprob.reshape(count) != 0) & (labels != -100)
    if incoming.grad_entropy is not None:
        active |= incoming.grad_entropy.reshape(count) != 0
    if problem.mask is not None:
        active &= problem.mask.reshape(count)
    return active


class _Rows(NamedTuple):
    """The rows with a gradient, packed; or those of a tile."""

    hidden: Tensor
    targets: Tensor
    incoming: Incoming
    temperatures: Tensor | None

    @classmethod
    def gathered(cls, picked: Picked, problem: HeadProblem, incoming: Incoming) -> _Rows:
        count, hidden = problem.rows, problem.hidden
        targets = picked.gather(problem.labels.reshape(count))
        given = incoming.each(lambda values: picked.gather(values.reshape(count)))
        # NaN here becomes NaN in all that is computed from these rows, at no cost in proportion to the weight.
        for gradient in (given.grad_logprob, given.grad_entropy):
            if gradient is not None:
                picked.poison_(gradient)
        if given.grad_logprob is not None and problem.shard.ranks is None and not hidden.is_cpu:
            # Labels on a GPU are not checked: one that is no token gives NaN.
            known = torch.where(targets < problem.weight.shape[0], given.grad_logprob, torch.nan)
            given = given._replace(grad_logprob=known)
        packed = picked.gather(hidden.reshape(count, hidden.shape[-1]))
        return cls(packed, targets, given, problem.temperatures(picked))

    def at(self, place: slice) -> _Rows:
        incoming = self.incoming.each(lambda values: values[place])
        return _Rows(self.hidden[place], self.targets[place], incoming, of_rows(self.temperatures, place))


def _sum_over_tiles(
    problem: HeadProblem, head: Head, rows: _Rows, wanted: Wanted, weight_grad_into: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = Tiles.cut(rows.hidden, head, problem.workspace_bytes)
    gradients = Gradients(rows.hidden, head, tiles, wanted, weight_grad_into)
    # The outer loop is over tokens: the gradient of a slab of the weight is complete when its tiles are done.
    for tokens in tiles.token_slices():
        for place in tiles.row_slices():
            tile = _gradient_of_tile(problem, head, rows.at(place), tokens, tiles.room(place, tokens))
            gradients.add(tile, rows.hidden[place], place, tokens)
        gradients.finish(tokens)
    return gradients.results()


def _gradient_of_tile(problem: HeadProblem, head: Head, rows: _Rows, tokens: slice, room: Tensor) -> Tensor:
    """The gradient of a tile's logits in the dtype of the weight, written over them. Narrower than they are, it lies in
    the front part of each row.
    """
    tile, cap = head.logits(rows.hidden, tokens, room), head.softcap
    gradient = tile.view(head.weight.dtype)[:, : tile.shape[1]]
    # The slope of a soft cap takes memory of its own, so the tile is then worked on in strips.
    step = max(1, len(tile) if cap is None else _STRIP // max(1, tile.shape[1]))
    for begin in range(0, len(tile), step):
        strip = slice(begin, begin + step)
        logits, part = tile[strip], rows.at(strip)
        slope = None if cap is None else logits.div(cap).square_().neg_().add_(1)
        grad_logprob, grad_entropy, *statistics = part.incoming
        _op.logprob_entropy_backward_.default(
            grad_logprob, grad_entropy, logits, part.targets, *statistics, problem.shard.first_token + tokens.start,
            problem.temperature, part.temperatures, gradient.dtype if slope is None else None,
        )  # fmt: skip
        if slope is not None:
            gradient[strip] = slope.mul_(logits)
    return gradient
