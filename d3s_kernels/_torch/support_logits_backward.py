"""The gradient of logprob_entropy for a list of support logits, of which an LM head computes only these."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, GradientArguments, NumberOrTensor, SupportArguments, Tile
from .kernels import op
from .logprob_entropy_backward import rows_of
from .support import SupportRows
from .support_logprob_entropy import gradients_at_ids, gradients_of_sets


def _fake_of_places(logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
    rows, places = logits.shape
    of_places = (logits.new_empty(places, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int32))
    return *of_places, logits.new_empty(rows, dtype=torch.bool)


@op(_fake_of_places)
def support_logits_backward(
    given: GradientArguments,
    support_of: int,
    supports: SupportArguments,
    temperature: NumberOrTensor = ONE,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four tensors. Three have one value for each support logit: its gradient, its row index (-1 if there is no
    gradient) and its id's column in the tile. The fourth has a flag for each row: whether the row's gradients are NaN.
    """
    logits = given.logits
    rows = rows_of(given, temperature, tile, support_of)
    support = SupportRows.of(supports, logits, rows.labels, tile, mask, support_of)
    rows = gradients_of_sets(rows, support)
    active = ~(rows.still | support.sets.dense)
    active = active if support.mask is None else active & support.mask
    undefined = rows.top.isnan() & active
    grad = torch.zeros(logits.shape[1], device=logits.device)
    of_row, tokens = (torch.zeros_like(grad, dtype=torch.int32) for _ in range(2))
    of_row.fill_(-1)
    for row, ids, place, z, read in support.support_logits(and_single=undefined):
        read = read & active[row]
        gradient = gradients_at_ids(rows.part(row), ids, z).masked_fill(undefined[row], math.nan)
        if logit_softcap is not None:
            gradient *= 1 - (z / logit_softcap).square()
        grad[place] = gradient.masked_fill(~read, 0)
        of_row[place] = torch.where(read, row, -1).int()
        tokens[place] = torch.where(read, tile.column(ids), 0).int()
    return grad, of_row, tokens, undefined
