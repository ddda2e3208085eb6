"""The forward of the LM head: it merges one tile of logits at a time into the rows' softmax states, and drops the tile.

A row's result has the same bits as from its whole logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kept import dense_rows, flat_rows, kept_logits, spans_of
from .picked import Picked
from .problem import HeadProblem, require_bounds, require_memory
from .products import without_autocast
from .tiles import Tiles, of_rows

_op = torch.ops.d3s_kernels


def no_logits(rows: int, like: Tensor) -> Tensor:
    """The initial states ``[rows, 4]``. The label's logit starts as NaN, and stays so if the label is no token."""
    state = like.new_zeros((rows, 4), dtype=torch.float32)
    state.select(1, 0).fill_(torch.finfo(torch.float32).min)
    state.select(1, 3).fill_(torch.nan)
    return state


def forward_op(max_rows: int | None = None, max_grad_rows: int | None = None, **given: Any) -> tuple[Tensor, ...]:
    require_bounds(max_rows=max_rows, max_grad_rows=max_grad_rows)
    return forward(HeadProblem.of(**given), max_rows)


def forward(problem: HeadProblem, max_rows: int | None) -> tuple[Tensor, ...]:
    problem.check()
    if problem.sampling_ids is None and problem.sampling_offsets is None and problem.max_dense_rows is None:
        try:
            return _of_all_tokens(problem, max_rows)
        except RuntimeError:
            require_memory(problem.weight, problem.bias)
            raise
    require_memory(problem.weight, problem.bias)
    outputs = _of_kept_tokens(problem)
    if problem.max_dense_rows != 0:
        dense = dense_rows(problem)
        assert dense.mask is not None
        all_tokens = _of_all_tokens(dense, _smaller(max_rows, problem.max_dense_rows))
        outputs = tuple(torch.where(dense.mask, *both) for both in zip(all_tokens, outputs, strict=True))
        outputs[0].masked_fill_(problem.labels == -100, 0.0)  # also with more dense rows than the bound
    if max_rows is not None and problem.mask is not None:
        exceeded = problem.mask.sum() > max_rows
        outputs = tuple(output.masked_fill(exceeded, torch.nan) for output in outputs)
    elif max_rows is not None and problem.rows > max_rows:  # the host knows
        outputs = tuple(torch.full_like(output, torch.nan) for output in outputs)
    return outputs


def _smaller(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


@without_autocast
def _of_kept_tokens(problem: HeadProblem) -> tuple[Tensor, ...]:
    """The outputs of the rows that have a span, 0 for others."""
    flat, temperatures = flat_rows(problem), problem.temperatures(None)
    logits, labels, mask = kept_logits(flat), flat.labels, flat.mask
    given = problem.temperature, temperatures, mask, *spans_of(problem), problem.max_dense_rows, len(problem.weight)
    if problem.shard.ranks is None:
        outputs = _op.logprob_entropy.default(logits, labels, *given)
    else:
        state = no_logits(problem.rows, logits)
        _op.softmax_state_.default(state, logits, labels, problem.shard.first_token, *given)
        outputs = _op.softmax_state_finish.default(problem.shard.everyones(state), problem.temperature, temperatures)
        outputs[0].masked_fill_(labels == -100, 0.0)
        if mask is not None:
            outputs = tuple(output.masked_fill_(~mask, 0.0) for output in outputs)
    return tuple(output.view(problem.labels.shape) for output in outputs)


@without_autocast
def _of_all_tokens(problem: HeadProblem, max_rows: int | None) -> tuple[Tensor, ...]:
    head = problem.head
    hidden, mask, count, shape = problem.hidden, problem.mask, problem.rows, problem.labels.shape
    if mask is None and max_rows is not None and count > max_rows:
        return tuple(hidden.new_full(shape, torch.nan, dtype=torch.float32) for _ in range(4))
    picked = None if mask is None else Picked.where(mask.reshape(count), max_rows)
    rows, targets = hidden.reshape(count, hidden.shape[-1]), problem.labels.reshape(count)
    if picked is not None:
        rows, targets = picked.gather(rows), picked.gather(targets)
    temperatures = problem.temperatures(picked)

    tiles = Tiles.cut(rows, head, problem.workspace_bytes)
    state = no_logits(len(rows), rows)
    for r in tiles.row_slices():
        for t in tiles.token_slices():
            logits = head.logits(rows[r], t, tiles.room(r, t))
            _op.softmax_state_.default(
                state[r], logits, targets[r], problem.shard.first_token + t.start, problem.temperature,
                of_rows(temperatures, r),
            )  # fmt: skip
    outputs = _op.softmax_state_finish.default(problem.shard.everyones(state), problem.temperature, temperatures)
    outputs[0].masked_fill_(targets == -100, 0.0)
    if picked is not None:
        outputs = picked.scatter(outputs, count)
    return tuple(output.view(shape) for output in outputs)
