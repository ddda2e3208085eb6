"""logprob_entropy, and the ops that compute it tile by tile of the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .softmax_state import SLICE, add_logits, finish, log_probability, merge, no_logits, row_blocks, temperatures

NO_TARGET = -100


def labels_of(labels: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """One label for each row; NO_TARGET if there are no labels."""
    if labels is None:
        return torch.full((rows,), NO_TARGET, dtype=torch.int64, device=like.device)
    return labels.reshape(-1).long()


def places_in_tile(labels: Tensor, first_token: int, columns: int) -> tuple[Tensor, Tensor]:
    """The place of each label in a tile that starts at first_token, and whether it is there; else the place is 0."""
    places = labels - first_token
    inside = (places >= 0) & (places < columns)
    return torch.where(inside, places, 0), inside


def at_places(tile: Tensor, places: Tensor) -> Tensor:
    """tile[row, places[row]]; NaN if the tile has no tokens."""
    if tile.shape[1] == 0:
        return torch.full(places.shape, math.nan, dtype=torch.float32, device=tile.device)
    return tile.gather(1, places.unsqueeze(1)).squeeze(1).float()


def logprob_entropy(
    logits: Tensor,
    labels: Tensor | None,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, columns = logits.shape[:-1], logits.shape[-1]
    count = math.prod(shape)
    targets = labels_of(labels, count, logits)
    each = temperatures(temperature, temperature_tensor, count, logits)
    results = [torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(4)]
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        tile, t, target = block.flatten(0, -2), each[rows], targets[rows]
        entropy, top, log_sum = finish(add_logits(no_logits(len(t), logits), tile, t), t)
        places, found = places_in_tile(target, 0, columns)
        logprob = log_probability(at_places(tile, places), top, log_sum, t)
        logprob = logprob.masked_fill(~found, math.nan).masked_fill(target == NO_TARGET, 0)
        for result, part in zip(results, (logprob, entropy, top, log_sum), strict=True):
            result[rows] = part if mask is None else part.masked_fill(~mask.reshape(-1)[rows], 0)
    logprob, entropy, top, log_sum = (result.view(shape) for result in results)
    return logprob, entropy, top, log_sum


def softmax_state_(
    state: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    first_token: int,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Merges a tile into the states [rows, 4]: (m, S, T, the label's logit, NaN until the label's tile is merged)."""
    count, columns = len(state), logits.shape[-1]
    targets = labels_of(labels, count, logits)
    each = temperatures(temperature, temperature_tensor, count, logits)
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        tile, before = block.flatten(0, -2), state[rows]
        places, found = places_in_tile(targets[rows], first_token, columns)
        merged = add_logits(before[:, :3].T, tile, each[rows])
        label_logit = at_places(tile, places).where(found, before[:, 3])
        after = torch.cat([merged, label_logit.unsqueeze(0)]).T
        state[rows] = after if mask is None else after.where(mask.reshape(-1, 1)[rows], before)


def softmax_state_finish(
    state: Tensor, temperature: float = 1.0, temperature_tensor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of states [rows, 4], or [pieces, rows, 4], where a row's pieces are merged from left to right."""
    first, *others = state.unsqueeze(0) if state.dim() == 2 else state
    each = temperatures(temperature, temperature_tensor, len(first), state)
    merged, label_logit = first[:, :3].T, first[:, 3]
    for piece in others:
        merged = merge(merged, piece[:, :3].T, each)
        label_logit = label_logit.where(~label_logit.isnan(), piece[:, 3])
    entropy, top, log_sum = finish(merged, each)
    return log_probability(label_logit, top, log_sum, each), entropy, top.clone(), log_sum
