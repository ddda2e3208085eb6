"""Products of the kept rows of an LM head's weight: rows are gathered, some at a time.

The pairs of a row or token are added up in one order, so that the bits are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_GATHERED = 1 << 24  # numbers at a time: 64 MB in float32


def kept_logits(hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    real = _among(rows, len(hidden)) & _among(tokens, len(weight))
    out = torch.zeros(rows.shape, dtype=torch.float32, device=hidden.device)
    for part in _parts(len(rows), hidden.shape[1]):
        left, right = (_taken(matrix, ids[part]) for matrix, ids in ((hidden, rows), (weight, tokens)))
        out[part] = _sum_by_halves(left * right)
    return torch.where(real, out, 0)


def kept_hidden_grad(grad: Tensor, weight: Tensor, tokens: Tensor, offsets: Tensor) -> Tensor:
    count, place = offsets.shape[0] - 1, torch.arange(len(tokens), device=tokens.device)
    row = torch.searchsorted(offsets[1:].long().contiguous(), place, right=True)
    inside = (place >= offsets[0]) & (row < count)
    out = torch.zeros(count, weight.shape[1], dtype=torch.float32, device=weight.device)
    _add_runs_(out, torch.where(inside, row, -1), weight, tokens, grad)
    return out


def kept_weight_grad_(grad: Tensor, hidden: Tensor, rows: Tensor, tokens: Tensor, out: Tensor) -> None:
    real = _among(rows, len(hidden)) & _among(tokens, len(out))
    targets, order = torch.where(real, tokens, -1).long().sort(stable=True)
    _add_runs_(out, targets, hidden, rows[order], grad[order])


def _among(ids: Tensor, count: int) -> Tensor:
    return (ids >= 0) & (ids < count)


def _parts(pairs: int, columns: int) -> Iterator[slice]:
    step = max(1, _GATHERED // max(1, columns))
    for begin in range(0, pairs, step):
        yield slice(begin, begin + step)


def _taken(matrix: Tensor, ids: Tensor) -> Tensor:
    """These rows in float32; 0 for a matrix without rows."""
    if len(matrix) == 0:
        return torch.zeros(len(ids), matrix.shape[1], device=matrix.device)
    return matrix.index_select(0, ids.long().clamp(0, len(matrix) - 1)).float()


def _sum_by_halves(values: Tensor) -> Tensor:
    """Sums over the last dimension."""
    while (n := values.shape[-1]) > 1:
        half = n // 2
        rest = values[..., 2 * half :]
        values = torch.cat([values[..., :half] + values[..., half : 2 * half], rest], -1)
    return values.sum(-1)


def _add_runs_(out: Tensor, targets: Tensor, matrix: Tensor, ids: Tensor, grad: Tensor) -> None:
    """out[target] += grad matrix[id]. Equal targets lie side by side; a target or an id of -1 stands for nothing."""
    if 0 in out.shape:
        return
    for part in _parts(len(targets), matrix.shape[1]):
        target = targets[part]
        terms = _taken(matrix, ids[part]) * grad[part].unsqueeze(1)
        terms = torch.where((_among(ids[part], len(matrix)) & (target >= 0)).unsqueeze(1), terms, 0)
        step = 1
        while step < len(target):  # each term becomes the sum of its run from there on
            same = (target[step:] == target[:-step]).unsqueeze(1)
            terms = torch.cat([terms[:-step] + torch.where(same, terms[step:], 0), terms[-step:]])
            step *= 2
        place = torch.arange(len(target), device=target.device)
        first = torch.cat([target.new_ones(1, dtype=torch.bool), target[1:] != target[:-1]])
        head = torch.where(first, place, 0).cummax(0).values  # where each run begins
        # All pairs of a run write the same row. Those of no target write what another run writes.
        none, other = target < 0, target.argmax()
        head, target = torch.where(none, head[other], head), torch.where(none, target[other], target).clamp(min=0)
        total = out.index_select(0, target).float() + terms.index_select(0, head)
        out.index_copy_(0, target, total.to(out.dtype))
