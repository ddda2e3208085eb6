"""The ops for rows of logits that have a support: which rows these are, their results, and their gradients. The results
are written into the same tensors as the results of the dense rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, GradientArguments, NumberOrTensor, SupportArguments, Tile
from .kernels import op
from .logprob_entropy import NO_TARGET, finished, labels_of, places_in_tile
from .logprob_entropy_backward import Rows, gradient_at, rows_of
from .softmax_state import merge, temperatures
from .support import SupportRows, Supports


def _fake_rows(values: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape[:-1], dtype=torch.bool), values.new_empty(1, dtype=torch.bool)


@op(_fake_rows)
def support_rows(
    values: Tensor,
    support_ids: Tensor,
    support_offsets: Tensor,
    max_dense_rows: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dense = Supports.of(SupportArguments(support_ids, support_offsets)).empty()
    if mask is not None:
        dense &= mask.reshape(-1)
    if max_dense_rows is None:
        exceeded = torch.zeros(1, dtype=torch.bool, device=values.device)
    else:
        exceeded = (dense.sum() > max_dense_rows).view(1)
    return dense.view(values.shape[:-1]), exceeded


@op()
def support_logprob_entropy_(
    logprob: Tensor,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    supports: SupportArguments,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    exceeded: Tensor | None = None,
    support_of: int | None = None,
) -> None:
    count = logprob.numel()
    targets, each = labels_of(labels, count, logits), temperatures(temperature, count, logits)
    rows = SupportRows.of(supports, logits, targets, ALL_TOKENS, mask, support_of)
    sets = rows.sets
    results = finished(rows.states(each), rows.label_logits()[0], sets.has_label, targets, each)
    of_single = torch.zeros_like(results) * each  # NaN if the temperature is invalid
    of_single[0].masked_fill_(~sets.has_label & (targets != NO_TARGET), math.nan)
    results = torch.where(sets.single, of_single, results)
    written = ~sets.dense
    if exceeded is not None:
        written |= exceeded
        results.masked_fill_(exceeded, math.nan)
        results[0].masked_fill_(targets == NO_TARGET, 0)
    if rows.mask is not None:
        written |= ~rows.mask
        results.masked_fill_(~rows.mask, 0)
    for out, result in zip((logprob, entropy, row_max, log_sum), results, strict=True):
        out.copy_(torch.where(written, result, out.view(-1)).view(out.shape))


@op()
def support_softmax_state_(
    state: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    supports: SupportArguments,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    exceeded: Tensor | None = None,
    support_of: int | None = None,
) -> None:
    targets, each = labels_of(labels, len(state), logits), temperatures(temperature, len(state), logits)
    rows = SupportRows.of(supports, logits, targets, tile, mask, support_of)
    merged = merge(state[:, :3].T, rows.states(each), each)
    label_logit, in_tile = rows.label_logits()
    after = torch.cat([merged, label_logit.where(in_tile, state[:, 3]).unsqueeze(0)]).T
    after = torch.where(rows.sets.single.unsqueeze(1), _with_single_tokens(state, rows), after)
    after = after.where(~rows.sets.dense.unsqueeze(1), state)
    if exceeded is not None:
        undefined = state.clone()
        undefined[:, 2].fill_(math.nan)
        after = torch.where(exceeded, undefined, after)
    state.copy_(after if rows.mask is None else after.where(rows.mask.unsqueeze(1), state))


def _with_single_tokens(state: Tensor, rows: SupportRows) -> Tensor:
    """Merges the tile into the states of rows whose set is a single id. The logit of this id counts as 0. If the id is
    in another tile, the row's state does not change. The results for other rows are not used.
    """
    ids, offsets = rows.supports.ids, rows.supports.offsets
    if len(ids) == 0:
        return state
    token = ids[offsets[:-1].clamp(0, len(ids) - 1)].long()
    _, in_tile = places_in_tile(token, rows.tile, rows.tokens)
    alone = torch.zeros_like(state)
    alone[:, 1] = 1
    alone[:, 3].masked_fill_(~rows.sets.has_label, math.nan)
    return torch.where(in_tile.unsqueeze(1), alone, state)


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradients_of_sets(rows: Rows, support: SupportRows) -> Rows:
    """Makes the gradient NaN for rows whose set is invalid or does not contain the label."""
    sets = support.sets
    outside = (support.targets != NO_TARGET) & ~sets.has_label & ~sets.dense & (rows.target != 0)
    return rows._replace(top=rows.top.masked_fill(outside | sets.bad, math.nan))


def gradients_at_ids(part: Rows, ids: Tensor, logits: Tensor) -> Tensor:
    """Returns the gradients of single logits. ``part`` has the values of each logit's row."""
    at_label = torch.where(ids == part.labels, part.target, 0)
    return gradient_at(part, logits.unsqueeze(1)).squeeze(1) + at_label


@op()
def support_logprob_entropy_backward_(
    given: GradientArguments,
    grad_logits: Tensor,
    supports: SupportArguments,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
) -> None:
    columns = given.logits.shape[-1]
    if columns == 0 or grad_logits.numel() == 0:
        return
    rows = rows_of(given, temperature, tile, columns)
    support = SupportRows.of(supports, given.logits, rows.labels, tile, mask)
    rows = gradients_of_sets(rows, support)
    still = rows.still | support.sets.dense
    still = still if support.mask is None else still | ~support.mask
    undefined = rows.top.isnan() & ~still
    out = grad_logits.view(-1, columns)
    for row, ids, column, z, read in support.support_logits():
        read = read & ~still[row] & ~undefined[row]
        # A logit that is not read has no gradient. For such a logit, another write is repeated: the write for the last
        # logit before it that is read, or else for the first logit that is read. If no logit of the piece is read, the
        # value at the first logit's place is written again.
        at = torch.where(read, torch.arange(len(row), device=row.device), -1).cummax(0).values
        at = torch.where(at < 0, read.int().argmax(0, keepdim=True), at)
        to = row[at], column[at].clamp(0, columns - 1)
        gradient = gradients_at_ids(rows.part(row), ids, z).to(out.dtype)
        out.index_put_(to, torch.where(read[at], gradient[at], out[to]))
    if not undefined.is_cpu or type(undefined) is not Tensor or undefined.any():  # on a GPU, the host cannot know
        out.masked_fill_(undefined.unsqueeze(1), math.nan)
