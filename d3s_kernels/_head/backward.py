"""The backward of the LM head: it recomputes each tile of logits, writes its gradient over it, and takes two products.

Only rows whose gradient is not 0 are computed. Where ranks share the vocabulary, each rank does this with its shard,
and the ranks sum their gradients of the hidden states (``shard.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .picked import Picked
from .problem import HeadProblem
from .products import Head, add_product, without_autocast
from .shard import Shard
from .tiles import Tiles, of_rows

_op = torch.ops.d3s_kernels

_STRIP = 4 << 20  # logits: enough to keep a GPU busy, and little memory


@without_autocast
def backward_of_shard(
    shard: Shard,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    temperature: float,
    temperature_tensor: Tensor | None,
    logit_softcap: float | None,
    mask: Tensor | None,
    max_grad_rows: int | None,
    logits_dtype: torch.dtype,
    workspace_bytes: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    problem = HeadProblem(
        shard, hidden, weight, labels, bias, temperature, temperature_tensor, logit_softcap, mask, logits_dtype,
        workspace_bytes,
    )  # fmt: skip
    head = problem.checked_head()
    want_hidden, *_ = wanted
    active = _rows_with_gradient(problem, grad_logprob, grad_entropy)
    if want_hidden:  # its rows are summed over the ranks, so all ranks must pick the same ones
        active = shard.anyones_(active)
    picked = Picked.where(active, max_grad_rows)
    rows = _Rows.gathered(picked, problem, grad_logprob, grad_entropy, (entropy, row_max, log_sum))
    tiles = Tiles.cut(rows.hidden, head, workspace_bytes)
    gradients = _Gradients(rows.hidden, head, tiles, wanted)
    # The outer loop is over tokens: the gradient of a slab of the weight is complete when its tiles are done.
    for tokens in tiles.token_slices():
        for place in tiles.row_slices():
            tile = _gradient_of_tile(head, shard, rows.at(place), tokens, temperature, tiles.room(place, tokens))
            gradients.add(tile, rows.hidden[place], place, tokens)
        gradients.finish(tokens)
    grad_rows, grad_weight, grad_bias = gradients.results()
    if not len(rows.hidden):  # no tile has carried the NaN of an exceeded bound
        grad_weight, grad_bias = picked.poison_(grad_weight), picked.poison_(grad_bias)
    # The shards' parts cancel, as those of the tokens do. If they were rounded before the sum, the error would grow
    # with the number of ranks.
    grad_hidden = shard.total_(grad_rows).to(hidden.dtype)
    if want_hidden:
        grad_hidden = picked.scatter(grad_hidden, labels.numel()).view(hidden.shape)
    return grad_hidden, grad_weight, grad_bias


def _rows_with_gradient(problem: HeadProblem, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    labels, count = problem.labels, problem.labels.numel()
    active = torch.zeros(count, dtype=torch.bool, device=labels.device)
    if grad_logprob is not None:
        active |= (grad_logprob.reshape(count) != 0) & (labels.reshape(count) != -100)
    if grad_entropy is not None:
        active |= grad_entropy.reshape(count) != 0
    if problem.mask is not None:
        active &= problem.mask.reshape(count)
    return active


class _Rows(NamedTuple):
    """The rows with a gradient, packed; or those of a tile."""

    hidden: Tensor
    targets: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    grad_logprob: Tensor | None
    grad_entropy: Tensor | None
    temperatures: Tensor | None

    @classmethod
    def gathered(
        cls,
        picked: Picked,
        problem: HeadProblem,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        saved: tuple[Tensor, Tensor, Tensor],
    ) -> _Rows:
        hidden, weight, count = problem.hidden, problem.weight, problem.labels.numel()

        def gather(values: Tensor) -> Tensor:
            return picked.gather(values.reshape(count, *values.shape[hidden.dim() - 1 :]))

        targets = gather(problem.labels)
        # NaN here becomes NaN in all that is computed from these rows, at no cost in proportion to the weight.
        g_logprob, g_entropy = (
            None if grad is None else picked.poison_(gather(grad)) for grad in (grad_logprob, grad_entropy)
        )
        if g_logprob is not None and problem.shard.ranks is None and not hidden.is_cpu:
            # Labels on a GPU are not checked: one that is no token gives NaN.
            g_logprob = torch.where(targets < weight.shape[0], g_logprob, torch.nan)
        temperatures = problem.temperature_tensor
        if temperatures is not None and temperatures.dim() > 0:
            temperatures = picked.gather_temperatures(temperatures.reshape(count))
        entropy, row_max, log_sum = map(gather, saved)
        return cls(gather(hidden), targets, entropy, row_max, log_sum, g_logprob, g_entropy, temperatures)

    def at(self, place: slice) -> _Rows:
        return _Rows(*(of_rows(values, place) for values in self))  # type: ignore[arg-type]  # each keeps its type


def _gradient_of_tile(head: Head, shard: Shard, rows: _Rows, tokens: slice, temperature: float, room: Tensor) -> Tensor:
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
        _op.logprob_entropy_backward_.default(
            part.grad_logprob, part.grad_entropy, logits, part.targets, part.entropy, part.row_max, part.log_sum,
            shard.first_token + tokens.start, temperature, part.temperatures,
            gradient.dtype if slope is None else None,
        )  # fmt: skip
        if slope is not None:
            gradient[strip] = slope.mul_(logits)
    return gradient


class _Gradients:
    """The gradients of hidden states, weight and bias, which the tiles fill; None where they are not wanted.

    Where several tiles of rows add to the weight's gradient, the sum is made in float32: in its place for a float32
    weight, else in a buffer for one slab of tokens.
    """

    def __init__(self, rows: Tensor, head: Head, tiles: Tiles, wanted: list[bool]) -> None:
        want_hidden, want_weight, want_bias = wanted
        weight, float32 = head.weight, torch.float32
        # Without a tile nothing is written, and the gradients are 0.
        fresh = torch.empty_like if rows.numel() and weight.numel() else torch.zeros_like
        self._weight = fresh(weight, memory_format=torch.contiguous_format) if want_weight else None
        self._hidden = fresh(rows, dtype=float32) if want_hidden else None
        self._bias = weight.new_zeros(weight.shape[0], dtype=float32) if want_bias else None
        self._sum: Tensor | None = None
        if want_weight and len(rows) > tiles.row_step and weight.dtype != float32:
            self._sum = weight.new_empty((tiles.token_step, weight.shape[1]), dtype=float32)
        self._head = head

    def add(self, tile: Tensor, rows: Tensor, place: slice, tokens: slice) -> None:
        """Adds what a tile contributes. The tiles of a slab of tokens come one after the other, first rows first."""
        if self._bias is not None:
            self._bias[tokens] += tile.sum(0, dtype=torch.float32)
        if self._hidden is not None:
            add_product(self._hidden[place], tile, self._head.weight[tokens], first=tokens.start == 0)
        if self._weight is not None:
            total = self._weight[tokens] if self._sum is None else self._sum[: tile.shape[1]]
            add_product(total, tile.t(), rows, first=place.start == 0)

    def finish(self, tokens: slice) -> None:
        """All tiles of a slab of tokens are there."""
        if self._weight is not None and self._sum is not None:
            self._weight[tokens] = self._sum[: tokens.stop - tokens.start]

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients: that of the rows in float32, the others in the dtype of the weight; empty if not wanted."""
        weight = self._head.weight
        return (
            weight.new_empty(0, dtype=torch.float32) if self._hidden is None else self._hidden,
            weight.new_empty(0) if self._weight is None else self._weight,
            weight.new_empty(0) if self._bias is None else self._bias.to(weight.dtype),
        )
