"""The op topk_softmax_state_: the largest logits of each row, and the softmax state of all others."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, NumberOrTensor, Tile
from .._segments.topk_entry import NO_ENTRY, entries_of, logits_of
from .kernels import op
from .softmax_state import SLICE, add_logits, merge, no_logits, row_blocks, temperatures


@op()
def topk_softmax_state_(
    state: Tensor,
    best: Tensor,
    logits: Tensor,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> None:
    """Leaves the k largest entries in ``best [rows, k]``, and merges all other logits into the rows' states."""
    each = temperatures(temperature, len(state), logits)
    after, largest = state.clone(), best.clone()
    columns = logits.shape[-1]
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        of_rows, entries = state[rows, :3].T, best[rows]
        flat = block.flatten(0, -2)
        for begin in range(0, columns, SLICE):
            part = flat[:, begin : begin + SLICE].float()
            of_rows, entries = _with_slice(of_rows, entries, part, tile.token(begin), each[rows])
        after[rows, :3], largest[rows] = of_rows.T, entries
    for written, values in ((state, after), (best, largest)):
        written.copy_(values if mask is None else values.where(mask.reshape(-1, 1), written))


def _with_slice(
    state: Tensor, best: Tensor, logits: Tensor, first_id: int, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    entries = entries_of(logits, first_id)
    after = torch.cat([best, entries], 1).topk(best.shape[1], 1).values  # all entries differ, except NO_ENTRY
    smallest = after[:, -1:]
    chosen = (entries >= smallest) & (entries != NO_ENTRY)
    state = add_logits(state, logits.masked_fill(chosen, -torch.inf), temperature)
    driven_out = logits_of(best).masked_fill(best >= smallest, -torch.inf)
    # Only one slice: k is smaller than SLICE. If no entry is driven out, the state stays the same.
    return merge(state, add_logits(no_logits(len(best), best), driven_out, temperature), temperature), after
