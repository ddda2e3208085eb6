"""The gradient of logprob_entropy: in a new tensor, in place in a tile of logits, or only for the kept logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import (
    ALL_TOKENS,
    NO_SAMPLING_MASK,
    ONE,
    GradientArguments,
    NumberOrTensor,
    SamplingArguments,
    Tile,
)
from .kernels import like, op
from .logprob_entropy import NO_TARGET, at_places, labels_of, places_in_tile
from .softmax_state import row_blocks, temperatures
from .spans import SpanRows


class _Rows(NamedTuple):
    """The values from which gradients are computed, one for each row; see GradientLine in csrc/core/softmax_state.h."""

    offset: Tensor
    slope: Tensor
    target: Tensor  # added to the gradient at the label
    top: Tensor  # the row's maximum, or NaN to make the row's whole gradient NaN
    temperature: Tensor
    labels: Tensor
    still: Tensor  # whether the row's whole gradient is 0, even if its logits are NaN

    def part(self, rows: slice | Tensor) -> _Rows:
        return _Rows(*(tensor[rows] for tensor in self))


@op(like("logits"))
def logprob_entropy_backward(
    given: GradientArguments,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
    sampling_mask: SamplingArguments = NO_SAMPLING_MASK,
) -> Tensor:
    logits = given.logits
    rows = _rows(given, temperature, tile, logits.shape[-1])
    if mask is not None:
        rows = rows._replace(still=rows.still | ~mask.reshape(-1))
    kept = SpanRows.of(sampling_mask, logits, rows.labels, tile, mask)
    if kept is not None:
        return _gradient_of_kept(rows, kept)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write(rows, logits, tile, out)
    return out


@op()
def logprob_entropy_backward_(
    given: GradientArguments,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    grad_dtype: torch.dtype | None = None,
) -> None:
    logits = given.logits
    rows = _rows(given, temperature, tile, logits.shape[-1])
    # A half-precision gradient of float32 logits overwrites only the front half of each row.
    _write(rows, logits, tile, logits.view(grad_dtype or logits.dtype)[..., : logits.shape[-1]])


def _rows(given: GradientArguments, temperature: NumberOrTensor, tile: Tile, tokens: int) -> _Rows:
    """Computes the values from which the gradients are computed. ``tokens`` is the number of tokens in the tile. If an
    unchecked label is no token, the whole gradient of its row becomes NaN.
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
    return _Rows(
        offset=-scale * (of_logprob + of_entropy * (entropy - log_sum)),
        slope=-scale * of_entropy / each,
        target=of_logprob / each,
        top=row_max.masked_fill(bad, math.nan),
        temperature=each,
        labels=targets,
        still=(of_logprob == 0) & (of_entropy == 0),
    )


def _write(all_rows: _Rows, logits: Tensor, tile: Tile, out: Tensor) -> None:
    """Writes the gradient to `out`, which may share memory with the logits."""
    columns = logits.shape[-1]
    if columns == 0:
        return
    for (rows, block), (_, to) in zip(row_blocks(logits, columns), row_blocks(out, columns), strict=True):
        row = all_rows.part(rows)
        gradient = _gradient(row, block.flatten(0, -2).float())
        places, in_tile = places_in_tile(row.labels, tile, columns)
        at_label = at_places(gradient, places)
        gradient.scatter_(1, places.unsqueeze(1), (at_label + row.target).where(in_tile, at_label).unsqueeze(1))
        to.copy_(gradient.masked_fill_(row.still.unsqueeze(-1), 0).view(to.shape))


def _fake_of_places(logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
    rows, places = logits.shape
    of_places = (logits.new_empty(places, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int32))
    return *of_places, logits.new_empty(rows, dtype=torch.bool)


@op(_fake_of_places)
def kept_logits_backward(
    given: GradientArguments,
    kept_of: int,
    temperature: NumberOrTensor = ONE,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
    sampling_mask: SamplingArguments = NO_SAMPLING_MASK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four tensors. Three have one value for each kept logit: its gradient, its row index (-1 if there is no
    gradient) and its token's column in the tile. The fourth has a flag for each row: whether the row's gradients are
    NaN.
    """
    logits = given.logits
    rows = _rows(given, temperature, tile, kept_of)
    kept = SpanRows.of(sampling_mask, logits, rows.labels, tile, mask, kept_of)
    assert kept is not None
    rows = _of_sets(rows, kept)
    active = ~(rows.still | kept.sets.dense)
    active = active if kept.mask is None else active & kept.mask
    undefined = rows.top.isnan() & active
    grad = torch.zeros(logits.shape[1], device=logits.device)
    of_row, tokens = (torch.zeros_like(grad, dtype=torch.int32) for _ in range(2))
    of_row.fill_(-1)
    for row, ids, place, z, read in kept.kept_logits(and_single=undefined):
        read = read & active[row]
        gradient = _gradient_at(rows.part(row), ids, z).masked_fill(undefined[row], math.nan)
        if logit_softcap is not None:
            gradient *= 1 - (z / logit_softcap).square()
        grad[place] = gradient.masked_fill(~read, 0)
        of_row[place] = torch.where(read, row, -1).int()
        tokens[place] = torch.where(read, tile.column(ids), 0).int()
    return grad, of_row, tokens, undefined


def _of_sets(rows: _Rows, kept: SpanRows) -> _Rows:
    """Makes the gradient NaN for rows whose set of kept tokens is invalid or does not contain the label."""
    outside = (kept.targets != NO_TARGET) & ~kept.sets.has_label & ~kept.sets.dense & (rows.target != 0)
    return rows._replace(top=rows.top.masked_fill(outside | kept.sets.bad, math.nan))


def _gradient_at(part: _Rows, ids: Tensor, logits: Tensor) -> Tensor:
    """Returns the gradients of single logits. ``part`` has the values of each logit's row."""
    at_label = torch.where(ids == part.labels, part.target, 0)
    return _gradient(part, logits.unsqueeze(1)).squeeze(1) + at_label


def _gradient_of_kept(rows: _Rows, kept: SpanRows) -> Tensor:
    count, columns = len(rows.top), kept.logits.shape[-1]
    rows = _of_sets(rows, kept)
    undefined = rows.top.isnan() & ~rows.still
    out = torch.empty(count + 1, columns, dtype=kept.logits.dtype, device=kept.logits.device)
    out[:count] = torch.where(undefined, math.nan, 0.0).unsqueeze(1)
    for row, ids, place, z, read in kept.kept_logits() if columns else ():
        part = rows.part(row)
        gradient = _gradient_at(part, ids, z)
        # Gradients of unread logits are written to an extra row at the end. They are spread over the columns of this
        # row, since a GPU would serialise many writes to one element.
        read = read & ~part.still & ~undefined[row]
        at = torch.where(read, row, count), torch.where(read, place, place % columns)
        out.index_put_(at, gradient.to(out.dtype))
    for row, logits, to in kept.dense_rows()[0]:
        gradients = torch.empty_like(logits)
        _write(rows.part(row), logits, kept.tile, gradients)
        out.index_copy_(0, to, gradients)
    return out[:count].view(kept.logits.shape)


def _gradient(row: _Rows, logits: Tensor) -> Tensor:
    distance = logits - row.top.unsqueeze(-1)
    e = torch.exp(distance / row.temperature.unsqueeze(-1))
    gradient = distance.mul_(row.slope.unsqueeze(-1)).add_(row.offset.unsqueeze(-1)).mul_(e)
    return torch.where(e > 0, gradient, e)  # 0 for a logit of -inf, whose product would be NaN; NaN for a logit of NaN
