"""The op logprob_entropy, and the ops that compute its results one vocabulary tile at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, NumberOrTensor, Tile
from .kernels import op, row_statistics
from .softmax_state import SLICE, add_logits, finish, log_probability, merge, no_logits, row_blocks, temperatures

NO_TARGET = -100


def labels_of(labels: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Returns one label for each row. If ``labels`` is None, every label is NO_TARGET."""
    if labels is None:
        return torch.full((rows,), NO_TARGET, dtype=torch.int64, device=like.device)
    return labels.reshape(-1).long()


def places_in_tile(labels: Tensor, tile: Tile, columns: int) -> tuple[Tensor, Tensor]:
    """Returns two tensors: each label's column in the tile (0 if the label is not in the tile), and whether it is in
    the tile.
    """
    places = tile.column(labels)
    inside = (places >= 0) & (places < columns)
    return torch.where(inside, places, 0), inside


def at_places(tile: Tensor, places: Tensor) -> Tensor:
    """Returns tile[row, places[row]] for each row, or NaN if the tile has no columns."""
    if tile.shape[1] == 0:
        return torch.full(places.shape, math.nan, dtype=torch.float32, device=tile.device)
    return tile.gather(1, places.unsqueeze(1)).squeeze(1).float()


@op(lambda logits, **_: row_statistics(logits, logits.shape[:-1]))
def logprob_entropy(
    logits: Tensor,
    labels: Tensor | None,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = logits.shape[:-1]
    count = math.prod(shape)
    targets = labels_of(labels, count, logits)
    results = _of_rows(logits, targets, temperatures(temperature, count, logits))
    if mask is not None:
        results.masked_fill_(~mask.reshape(-1), 0)
    # The results are copied, since the results of an op must not share memory.
    logprob, entropy, top, log_sum = (result.clone().view(shape) for result in results)
    return logprob, entropy, top, log_sum


@op(lambda logits, **_: row_statistics(logits, logits.shape[:-1])[:2])
def logprob_entropy_no_grad(
    logits: Tensor,
    labels: Tensor | None,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logprob, entropy, _, _ = logprob_entropy(logits, labels, temperature, mask)
    return logprob, entropy


def _of_rows(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Returns the four results of each row, [4, rows]: log-probability, entropy, maximum and log S."""
    columns = logits.shape[-1]
    results = torch.empty(4, len(targets), dtype=torch.float32, device=logits.device)
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        tile, t, target = block.flatten(0, -2), temperature[rows], targets[rows]
        places, in_tile = places_in_tile(target, ALL_TOKENS, columns)
        state = add_logits(no_logits(len(t), logits), tile, t)
        results[:, rows] = finished(state, at_places(tile, places), in_tile, target, t)
    return results


def finished(state: Tensor, label_logit: Tensor, in_tile: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    """Returns the four results of each row, [4, rows], from the row's state. The log-probability is NaN where
    ``in_tile`` is False, unless the row has no label.
    """
    entropy, top, log_sum = finish(state, temperature)
    logprob = log_probability(label_logit, top, log_sum, temperature)
    logprob = logprob.masked_fill(~in_tile, math.nan).masked_fill(target == NO_TARGET, 0)
    return torch.stack([logprob, entropy, top, log_sum])


@op()
def softmax_state_(
    state: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> None:
    """Merges a tile of logits into the rows' softmax states [rows, 4]. A state is (m, S, T, the label's logit). The
    label's logit is NaN until the tile that contains the label is merged.
    """
    targets = labels_of(labels, len(state), logits)
    each = temperatures(temperature, len(state), logits)
    after = _merged(state, logits, targets, each, tile)
    state.copy_(after if mask is None else after.where(mask.reshape(-1, 1), state))


def _merged(state: Tensor, logits: Tensor, targets: Tensor, temperature: Tensor, tile: Tile) -> Tensor:
    columns, after = logits.shape[-1], torch.empty_like(state)
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        flat, before = block.flatten(0, -2), state[rows]
        places, in_tile = places_in_tile(targets[rows], tile, columns)
        merged = add_logits(before[:, :3].T, flat, temperature[rows])
        label_logit = at_places(flat, places).where(in_tile, before[:, 3])
        after[rows] = torch.cat([merged, label_logit.unsqueeze(0)]).T
    return after


@op(lambda state, **_: row_statistics(state, state.shape[-2:-1]))
def softmax_state_finish(state: Tensor, temperature: NumberOrTensor = ONE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the results of rows from their states [rows, 4] or [pieces, rows, 4]. The states of a row's pieces are
    merged from the first piece to the last.
    """
    first, *others = state.unsqueeze(0) if state.dim() == 2 else state
    each = temperatures(temperature, len(first), state)
    merged, label_logit = first[:, :3].T, first[:, 3]
    for piece in others:
        merged = merge(merged, piece[:, :3].T, each)
        label_logit = label_logit.where(~label_logit.isnan(), piece[:, 3])
    entropy, top, log_sum = finish(merged, each)
    return log_probability(label_logit, top, log_sum, each), entropy, top.clone(), log_sum
