"""The op logprob_entropy, and the ops that compute its results one vocabulary tile at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, NO_SAMPLING_MASK, ONE, NumberOrTensor, SamplingArguments, Tile
from .kernels import op, row_statistics
from .softmax_state import SLICE, add_logits, finish, log_probability, merge, no_logits, row_blocks, temperatures
from .spans import SpanRows

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
    """Returns tile[row, places[row]] for each row, or NaN if the tile has no tokens."""
    if tile.shape[1] == 0:
        return torch.full(places.shape, math.nan, dtype=torch.float32, device=tile.device)
    return tile.gather(1, places.unsqueeze(1)).squeeze(1).float()


@op(lambda logits, **_: row_statistics(logits, logits.shape[:-1]))
def logprob_entropy(
    logits: Tensor,
    labels: Tensor | None,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    sampling_mask: SamplingArguments = NO_SAMPLING_MASK,
    kept_of: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = logits.shape[:-1]
    count = math.prod(shape)
    targets = labels_of(labels, count, logits)
    each = temperatures(temperature, count, logits)
    rows = SpanRows.of(sampling_mask, logits, targets, ALL_TOKENS, mask, kept_of)
    results = _of_all_tokens(logits, targets, each) if rows is None else _of_kept_tokens(rows, each)
    if mask is not None:
        results.masked_fill_(~mask.reshape(-1), 0)
    # The results are copied, since the results of an op must not share memory.
    logprob, entropy, top, log_sum = (result.clone().view(shape) for result in results)
    return logprob, entropy, top, log_sum


def _of_all_tokens(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Returns the four results of each row, [4, rows]: log-probability, entropy, maximum and log S."""
    columns = logits.shape[-1]
    results = torch.empty(4, len(targets), dtype=torch.float32, device=logits.device)
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        tile, t, target = block.flatten(0, -2), temperature[rows], targets[rows]
        places, in_tile = places_in_tile(target, ALL_TOKENS, columns)
        state = add_logits(no_logits(len(t), logits), tile, t)
        results[:, rows] = _finished(state, at_places(tile, places), in_tile, target, t)
    return results


def _finished(state: Tensor, label_logit: Tensor, in_tile: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    entropy, top, log_sum = finish(state, temperature)
    logprob = log_probability(label_logit, top, log_sum, temperature)
    logprob = logprob.masked_fill(~in_tile, math.nan).masked_fill(target == NO_TARGET, 0)
    return torch.stack([logprob, entropy, top, log_sum])


def _of_kept_tokens(rows: SpanRows, temperature: Tensor) -> Tensor:
    sets, targets = rows.sets, rows.targets
    results = _finished(rows.states(temperature), rows.label_logits()[0], sets.has_label, targets, temperature)
    of_single = torch.zeros_like(results) * temperature  # NaN if the temperature is invalid
    of_single[0].masked_fill_(~sets.has_label & (targets != NO_TARGET), math.nan)
    results = torch.cat([torch.where(sets.single, of_single, results), results.new_empty(4, 1)], 1)
    if rows.kept_alone:
        results[:, :-1].masked_fill_(sets.dense, 0)
    dense, exceeded = rows.dense_rows()
    for row, logits, to in dense:
        results.index_copy_(1, to, _of_all_tokens(logits, targets[row], temperature[row]))
    results = results[:, :-1].masked_fill(exceeded, math.nan)
    results[0].masked_fill_(targets == NO_TARGET, 0)
    return results


@op()
def softmax_state_(
    state: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    sampling_mask: SamplingArguments = NO_SAMPLING_MASK,
    kept_of: int | None = None,
) -> None:
    """Merges a tile of logits into the rows' softmax states [rows, 4]. A state is (m, S, T, the label's logit). The
    label's logit is NaN until the tile that contains the label is merged.
    """
    targets = labels_of(labels, len(state), logits)
    each = temperatures(temperature, len(state), logits)
    rows = SpanRows.of(sampling_mask, logits, targets, tile, mask, kept_of)
    if rows is None:
        after = _merged_with_all(state, logits, targets, each, tile)
    else:
        after = _merged_with_kept(state, rows, each)
    state.copy_(after if mask is None else after.where(mask.reshape(-1, 1), state))


def _merged_with_all(state: Tensor, logits: Tensor, targets: Tensor, temperature: Tensor, tile: Tile) -> Tensor:
    columns, after = logits.shape[-1], torch.empty_like(state)
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        flat, before = block.flatten(0, -2), state[rows]
        places, in_tile = places_in_tile(targets[rows], tile, columns)
        merged = add_logits(before[:, :3].T, flat, temperature[rows])
        label_logit = at_places(flat, places).where(in_tile, before[:, 3])
        after[rows] = torch.cat([merged, label_logit.unsqueeze(0)]).T
    return after


def _merged_with_kept(state: Tensor, rows: SpanRows, temperature: Tensor) -> Tensor:
    merged = merge(state[:, :3].T, rows.states(temperature), temperature)
    label_logit, in_tile = rows.label_logits()
    after = torch.cat([merged, label_logit.where(in_tile, state[:, 3]).unsqueeze(0)]).T
    after = torch.where(rows.sets.single.unsqueeze(1), _with_single_tokens(state, rows), after)
    after = torch.cat([after, after.new_empty(1, 4)])
    dense, exceeded = rows.dense_rows()
    for row, logits, to in dense:
        after[to] = _merged_with_all(state[row], logits, rows.targets[row], temperature[row], rows.tile)
    after[:, 2].masked_fill_(exceeded, math.nan)
    return after[:-1]


def _with_single_tokens(state: Tensor, rows: SpanRows) -> Tensor:
    """Merges the tile into the states of rows with a single kept token. The logit of this token counts as 0. If the
    token is in another tile, the row's state does not change. The results for other rows are not used.
    """
    ids, offsets = rows.spans.ids, rows.spans.offsets
    if len(ids) == 0:
        return state
    token = ids[offsets[:-1].clamp(0, len(ids) - 1)].long()
    _, in_tile = places_in_tile(token, rows.tile, rows.tokens)
    alone = torch.zeros_like(state)
    alone[:, 1] = 1
    alone[:, 3].masked_fill_(~rows.sets.has_label, math.nan)
    return torch.where(in_tile.unsqueeze(1), alone, state)


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
