"""The softmax states (m, S, T) of rows of logits, as in csrc/core/softmax_state.h. The states of all rows are one
float32 tensor [3, rows].

A row's result is bitwise equal in any batch: maxima are exact, sums are pairwise, and torch.exp (unlike torch.exp2 on a
CPU) does not depend on an element's position in the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._arguments.bundles import NumberOrTensor

# The number of columns in a slice of a row. Each slice is reduced to one state, and the states are merged from left to
# right. On every device, vocabulary tiles are cut at multiples of SLICE (d3s_kernels/_lm_head/tiles.py).
SLICE = 8192
_BLOCK = 3 << 20  # the number of logits that are processed at a time: five float32 temporaries take 60 MiB
LOWEST = torch.finfo(torch.float32).min


def row_blocks(logits: Tensor, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows block by block, as pairs: a slice of row indices, and a view [..., V] of these rows' logits. A
    block has at most _BLOCK // columns rows, but at least one row. Leading dimensions stay separate, since flattening
    them may need a copy.
    """
    yield from _blocks(logits.unsqueeze(0) if logits.dim() == 1 else logits, max(1, _BLOCK // max(1, columns)), 0)


def _blocks(logits: Tensor, most: int, first: int) -> Iterator[tuple[slice, Tensor]]:
    inner = math.prod(logits.shape[1:-1])
    if inner > most:
        for i in range(logits.shape[0]):
            yield from _blocks(logits[i], most, first + i * inner)
        return
    for part in torch.split(logits, max(1, most // max(1, inner))):
        rows = part.shape[0] * inner
        yield slice(first, first + rows), part
        first += rows


def temperatures(temperature: NumberOrTensor, rows: int, like: Tensor) -> Tensor:
    """Returns one temperature for each row. A temperature on a GPU has not been checked: an invalid temperature becomes
    NaN, and so do the results of its row.
    """
    number, tensor = temperature
    if tensor is None:
        return torch.full((rows,), number, dtype=torch.float32, device=like.device)
    each = tensor.expand(rows) if tensor.dim() == 0 else tensor.reshape(-1)
    return torch.where((each > 0.999e-15) & (each < 1.001e15), each, math.nan)


def no_logits(rows: int, like: Tensor) -> Tensor:
    """Returns the states of rows before any logits are added. The maximum is the lowest finite float instead of -inf,
    since -inf - (-inf) would be NaN.
    """
    state = torch.zeros(3, rows, dtype=torch.float32, device=like.device)
    state[0].fill_(LOWEST)
    return state


def add_logits(state: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the states after the logits [rows, n] are merged into ``state``."""
    for part in torch.split(logits, SLICE, -1) if logits.shape[-1] else ():
        state = merge(state, _state_of(part.float(), temperature), temperature)
    return state


def _state_of(logits: Tensor, temperature: Tensor) -> Tensor:
    top = logits.amax(-1).clamp(min=LOWEST)
    distance = logits - top.unsqueeze(-1)
    terms = distance.new_empty(2, *distance.shape)
    torch.exp(distance / temperature.unsqueeze(-1), out=terms[0])
    torch.mul(distance.clamp_(min=LOWEST), terms[0], out=terms[1])  # -inf * 0 would be NaN
    return torch.cat([top.unsqueeze(0), sum_by_halves_(terms)])


def sum_by_halves_(values: Tensor) -> Tensor:
    """Sums over the last dimension, which must not be empty. The values are overwritten."""
    while (n := values.shape[-1]) > 1:
        values[..., : n // 2] += values[..., n - n // 2 :]
        values = values[..., : n - n // 2]
    return values.squeeze(-1)


def merge(a: Tensor, b: Tensor, temperature: Tensor) -> Tensor:
    a_leads = a[0] >= b[0]
    leader, follower = torch.where(a_leads, a, b), torch.where(a_leads, b, a)
    move = follower[0] - leader[0]
    factor = torch.exp(move / temperature)
    safe_move = torch.where(factor > 0, move, 0)  # -inf * 0 is NaN
    total = leader[1] + factor * follower[1]
    dot = leader[2] + factor * (follower[2] + safe_move * follower[1])
    return torch.stack([leader[0], total, dot])


def finish(state: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the entropy, the maximum and log S of each state."""
    top, total, dot = state
    undefined = (total < 0.5) | dot.isnan()  # the row has no logit above -inf, or it has a NaN or +inf
    total = total.masked_fill(undefined, math.nan)
    log_sum = total.log()
    mean = dot / (temperature * total)
    return (log_sum - mean.clamp(max=0)).clamp(min=0), top, log_sum


def log_probability(logit: Tensor, top: Tensor, log_sum: Tensor, temperature: Tensor) -> Tensor:
    return (logit - top) / temperature - log_sum
