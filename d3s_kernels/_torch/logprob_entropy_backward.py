"""The gradient of logprob_entropy: in a new tensor, in place in a tile of logits, or of some rows of a tile."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, GradientArguments, NumberOrTensor, Tile
from .kernels import like, op
from .logprob_entropy import NO_TARGET, at_places, labels_of, places_in_tile
from .softmax_state import row_blocks, temperatures


class Rows(NamedTuple):
    """The values from which gradients are computed, one for each row; see GradientLine in csrc/core/softmax_state.h."""

    offset: Tensor
    slope: Tensor
    target: Tensor  # added to the gradient at the label
    top: Tensor  # the row's maximum, or NaN to make the row's whole gradient NaN
    temperature: Tensor
    labels: Tensor
    still: Tensor  # whether the row's whole gradient is 0, even if its logits are NaN

    def part(self, rows: slice | Tensor) -> Rows:
        return Rows(*(tensor[rows] for tensor in self))


@op(like("logits"))
def logprob_entropy_backward(
    given: GradientArguments,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
) -> Tensor:
    logits = given.logits
    rows = rows_of(given, temperature, tile, logits.shape[-1])
    if mask is not None:
        rows = rows._replace(still=rows.still | ~mask.reshape(-1))
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write(rows, _blocks(logits), tile, out)
    return out


@op()
def logprob_entropy_backward_(
    given: GradientArguments,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    grad_dtype: torch.dtype | None = None,
) -> None:
    logits = given.logits
    rows = rows_of(given, temperature, tile, logits.shape[-1])
    # A half-precision gradient of float32 logits overwrites only the front half of each row.
    _write(rows, _blocks(logits), tile, logits.view(grad_dtype or logits.dtype)[..., : logits.shape[-1]])


@op()
def logprob_entropy_backward_rows_(
    given: GradientArguments,
    rows: Tensor,
    grad_logits: Tensor,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
) -> None:
    logits, columns = given.logits, grad_logits.shape[-1]
    packed = rows_of(given._replace(logits=grad_logits), temperature, tile, columns)
    # A row that does not exist has not been checked on a GPU. Another row is read in its place, if there is one.
    packed = packed._replace(top=packed.top.masked_fill((rows < 0) | (rows >= len(logits)), math.nan))
    logits = logits if len(logits) else logits.new_zeros(1, columns)
    places = rows.clamp(0, len(logits) - 1)
    blocks = (logits.index_select(0, places[part]) for part, _ in row_blocks(grad_logits, columns))
    _write(packed, blocks, tile, grad_logits)


def rows_of(given: GradientArguments, temperature: NumberOrTensor, tile: Tile, tokens: int) -> Rows:
    """Computes the values from which the gradients are computed. ``tokens`` is the number of ids in the tile. If an
    unchecked label is no id of the vocabulary, the whole gradient of its row becomes NaN.
    """
    grad_logprob, grad_entropy, logits, labels, *of_forward = given
    entropy, row_max, log_sum = (values.reshape(-1) for values in of_forward)
    targets, each = labels_of(labels, len(entropy), logits), temperatures(temperature, len(entropy), logits)
    none = torch.zeros_like(entropy)
    of_logprob = none if grad_logprob is None else grad_logprob.reshape(-1).masked_fill(targets == NO_TARGET, 0)
    of_entropy = none if grad_entropy is None else grad_entropy.reshape(-1)
    bad = (targets != NO_TARGET) & (targets < 0)
    if tile == ALL_TOKENS:  # otherwise the size of the vocabulary is unknown
        bad |= targets >= tokens
    bad = (bad & (of_logprob != 0)) | log_sum.isnan() | of_logprob.isnan() | of_entropy.isnan()
    scale = torch.exp(-log_sum) / each
    return Rows(
        offset=-scale * (of_logprob + of_entropy * (entropy - log_sum)),
        slope=-scale * of_entropy / each,
        target=of_logprob / each,
        top=row_max.masked_fill(bad, math.nan),
        temperature=each,
        labels=targets,
        still=(of_logprob == 0) & (of_entropy == 0),
    )


def _blocks(logits: Tensor) -> Iterable[Tensor]:
    return (block for _, block in row_blocks(logits, logits.shape[-1]))


def _write(all_rows: Rows, blocks: Iterable[Tensor], tile: Tile, out: Tensor) -> None:
    """Writes the gradient to `out`, which may share memory with the logits. `blocks` has the logits of each block of
    rows.
    """
    columns = out.shape[-1]
    if columns == 0:
        return
    for block, (rows, to) in zip(blocks, row_blocks(out, columns), strict=True):
        row = all_rows.part(rows)
        gradient = gradient_at(row, block.flatten(0, -2).float())
        places, in_tile = places_in_tile(row.labels, tile, columns)
        at_label = at_places(gradient, places)
        gradient.scatter_(1, places.unsqueeze(1), (at_label + row.target).where(in_tile, at_label).unsqueeze(1))
        to.copy_(gradient.masked_fill_(row.still.unsqueeze(-1), 0).view(to.shape))


def gradient_at(row: Rows, logits: Tensor) -> Tensor:
    """Returns the gradients of logits [rows, n] of these rows, without the term at the label."""
    distance = logits - row.top.unsqueeze(-1)
    e = torch.exp(distance / row.temperature.unsqueeze(-1))
    gradient = distance.mul_(row.slope.unsqueeze(-1)).add_(row.offset.unsqueeze(-1)).mul_(e)
    return torch.where(e > 0, gradient, e)  # 0 for a logit of -inf, whose product would be NaN; NaN for a logit of NaN
