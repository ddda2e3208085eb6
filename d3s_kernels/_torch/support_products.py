"""Products with the rows of an LM head's weight that belong to supports. The rows are gathered piece by piece.

The terms of a sum are always added in the same order, so the sum is bitwise equal in every run and in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, SupportArguments, Tile
from .kernels import op
from .support import Sets, Supports

_GATHERED = 1 << 24  # the number of elements that are gathered at a time: 64 MiB in float32


def _fake_support_logits(hidden: Tensor, support_ids: Tensor, **_: Any) -> Tensor:
    return hidden.new_empty(support_ids.shape[0] + hidden.shape[0], dtype=torch.float32)


@op(_fake_support_logits)
def support_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    supports: SupportArguments,
    bias: Tensor | None = None,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    of_rows = Supports.of(supports)
    sets = Sets.of(of_rows, labels.long(), tile, len(weight))
    counts = ~sets.single if mask is None else ~sets.single & mask
    out = torch.full((len(of_rows.ids) + len(labels),), -torch.inf, device=hidden.device)
    rows = torch.arange(len(labels), device=labels.device)
    label_pieces = (rows, labels.long(), sets.label_joins, len(of_rows.ids) + rows)
    for row, ids, used, place in (*of_rows.pieces(), label_pieces):
        token = tile.column(ids)
        needed = used & counts[row] & (token >= 0) & (token < len(weight))
        step = max(1, _GATHERED // max(1, hidden.shape[1]))
        for begin in range(0, len(row), step):
            part = slice(begin, begin + step)
            z = _sum_by_halves(_taken(hidden, row[part]) * _taken(weight, token[part])).to(logits_dtype)
            if bias is not None:
                z = z + _taken(bias.view(-1, 1), token[part]).squeeze(1)
                z = z.to(logits_dtype)
            if logit_softcap is not None:
                z = (z / logit_softcap).tanh() * logit_softcap
            out[place[part]] = z.float().masked_fill(~needed[part], -torch.inf)
    return out.masked_fill(of_rows.bad, torch.nan)


@op()
def support_hidden_grad_(
    grad: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor, offsets: Tensor, undefined: Tensor, out: Tensor
) -> None:
    total = torch.zeros(len(undefined), weight.shape[1], device=weight.device)
    _add_runs_(total, rows, weight, tokens, grad)
    total = total.masked_fill_(undefined.unsqueeze(1), torch.nan).to(out.dtype)
    out.copy_(torch.where(((offsets.diff() != 0) | undefined).unsqueeze(1), total, out))


@op()
def support_weight_grad_(
    grad: Tensor, hidden: Tensor, rows: Tensor, tokens: Tensor, out: Tensor, bias_out: Tensor | None = None
) -> None:
    real = _among(rows, len(hidden)) & _among(tokens, len(out))
    targets = torch.where(real, tokens, -1)
    _add_runs_(out, targets, hidden, rows, grad)
    if bias_out is not None:
        _add_runs_(bias_out.view(-1, 1), targets, grad.new_ones(1, 1), torch.zeros_like(rows), grad)


def _among(ids: Tensor, count: int) -> Tensor:
    return (ids >= 0) & (ids < count)


def _taken(matrix: Tensor, ids: Tensor) -> Tensor:
    """Returns the rows ``ids`` of the matrix in float32, or zeros if the matrix has no rows."""
    if len(matrix) == 0:
        return torch.zeros(len(ids), matrix.shape[1], device=matrix.device)
    return matrix.index_select(0, ids.long().clamp(0, len(matrix) - 1)).float()


def _sum_by_halves(values: Tensor) -> Tensor:
    """Sums over the last dimension, by repeatedly adding the second half to the first half."""
    while (n := values.shape[-1]) > 1:
        half = n // 2
        rest = values[..., 2 * half :]
        values = torch.cat([values[..., :half] + values[..., half : 2 * half], rest], -1)
    return values.sum(-1)


def _add_runs_(out: Tensor, targets: Tensor, matrix: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds to each out[r] the sum of grad[i] * matrix[ids[i]] over all i with targets[i] == r, in the order of i.
    Targets that are not rows of ``out`` are skipped. The work is split only by columns, so no sum is split.
    """
    if 0 in out.shape or len(targets) == 0:
        return
    target, order = torch.where(_among(targets, len(out)), targets, -1).long().sort(stable=True)
    ids, grad = ids[order], torch.where(target < 0, 0, grad[order])
    first = torch.cat([target.new_ones(1, dtype=torch.bool), target[1:] != target[:-1]])
    place = torch.arange(len(target), device=target.device)
    # head[i] is the index of the first element of i's run. There, the sum of the run is stored.
    head = torch.where(first, place, 0).cummax(0).values
    # All elements of a run write the same value to the same row of out. Elements without a target repeat the write of
    # the run with the largest target. If no element has a target, all elements add 0 to row 0.
    none, last = target < 0, target.argmax(0, keepdim=True)  # 1-d, since a 0-d index would cause a host sync
    head, target = torch.where(none, head[last], head), torch.where(none, target[last], target).clamp(min=0)
    step = max(1, _GATHERED // len(target))
    for begin in range(0, out.shape[1], step):
        columns = slice(begin, begin + step)
        terms = _sums_of_runs(_taken(matrix[:, columns], ids) * grad.unsqueeze(1), target, none)
        total = out[:, columns].index_select(0, target).float() + terms.index_select(0, head)
        out[:, columns].index_copy_(0, target, total.to(out.dtype))


def _sums_of_runs(terms: Tensor, target: Tensor, none: Tensor) -> Tensor:
    """Returns for each term the sum of all terms from this term to the end of its run."""
    terms = terms.masked_fill_(none.unsqueeze(1), 0)
    step = 1
    while step < len(target):
        same = (target[step:] == target[:-step]).unsqueeze(1)
        terms = torch.cat([terms[:-step] + torch.where(same, terms[step:], 0), terms[-step:]])
        step *= 2
    return terms
