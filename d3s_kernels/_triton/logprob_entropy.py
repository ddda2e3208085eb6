"""logprob_entropy in Triton, as in ``csrc/cuda/logprob_entropy.cu``. ``logprob_entropy_backward.py`` has the backward.

A row is cut into slices of a fixed size. Each slice has its own program, which keeps a softmax state in every lane, and
merges the states of all lanes at the end. A second kernel merges the slices of a row from left to right, and computes
the row's results. So a row's result is bitwise equal in any batch, and a few rows are enough to keep a GPU busy.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, NumberOrTensor, Tile
from . import launch
from .launch import EXACT, contiguous
from .order_key import ABSENT, order_key
from .rows import PLACE, Rows, row_start, temperature_arguments, temperature_of
from .softmax_state import LOG2_E, LOWEST, add, finish, load_columns, merge, merge_lanes

SLICE = 32768  # elements; the class Tiles (d3s_kernels/_lm_head/tiles.py) cuts tiles at multiples of SLICE
LANES = 256
IN_FLIGHT = 4  # vectors of 16 bytes that a lane loads before it uses the first vector
MERGERS = 128  # the number of rows in a program that merges slices
NO_TARGET = tl.constexpr(-100)


@triton.jit(do_not_specialize=[*PLACE, "columns", "slices", "temperature_bits"])
def reduce_slices(
    logits, inner, outer_stride, inner_stride, columns, slices, mask, temperatures, temperature_bits, states,
    STEP: tl.constexpr, PER_ROW: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr, IN_FLIGHT: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Computes the state of one slice of one row."""
    task = tl.program_id(0).to(tl.int64)
    row = task // slices
    if mask is not None:
        if not tl.load(mask + row):
            return
    scale = tl.div_rn(LOG2_E, temperature_of(row, temperatures, temperature_bits, PER_ROW))
    start = row_start(logits, row, inner, outer_stride, inner_stride, STEP)
    first = (task % slices).to(tl.int32) * SLICE
    end = tl.minimum(first + SLICE, columns)
    m = tl.full([LANES, 1], LOWEST, tl.float32)
    s = tl.zeros([LANES, 1], tl.float32)
    t = tl.zeros([LANES, 1], tl.float32)
    SHARE: tl.constexpr = LANES * VECTOR
    whole = end - (end - first) % (SHARE * IN_FLIGHT)
    for begin in range(first, whole, SHARE * IN_FLIGHT):
        z = ()
        for i in tl.static_range(IN_FLIGHT):
            z = z + load_columns(start, begin + i * SHARE, end, LANES, VECTOR, STEP, False)
        m, s, t = add(m, s, t, z, scale)
    for begin in range(whole, end, SHARE):
        m, s, t = add(m, s, t, load_columns(start, begin, end, LANES, VECTOR, STEP, True), scale)
    m, s, t = merge_lanes(tl.reshape(m, [LANES]), tl.reshape(s, [LANES]), tl.reshape(t, [LANES]), scale)
    tl.store(states + 3 * task, m)
    tl.store(states + 3 * task + 1, s)
    tl.store(states + 3 * task + 2, t)


@triton.jit
def merge_slices(states, slices, row, here, m, s, t, scale):
    """Merges the slices of rows into the rows' states (m, s, t), from left to right."""
    for slice in range(slices):
        state = states + 3 * (row * slices + slice)
        other_m = tl.load(state, mask=here, other=LOWEST)
        other_s = tl.load(state + 1, mask=here, other=0.0)
        other_t = tl.load(state + 2, mask=here, other=0.0)
        m, s, t = merge(m, s, t, other_m, other_s, other_t, scale)
    return m, s, t


@triton.jit(do_not_specialize=[*PLACE, "count", "columns", "slices", "temperature_bits", "tokens_per_advantage"])
def finish_rows(
    states, slices, count, logits, inner, outer_stride, inner_stride, columns, mask, labels, temperatures,
    temperature_bits, logprobs, entropies, maxima, log_sums, keys, advantages, tokens_per_advantage,
    STEP: tl.constexpr, PER_ROW: tl.constexpr, MERGERS: tl.constexpr,
):  # fmt: skip
    """Computes the results of rows from their slices. With ``keys``, also writes the order keys of |A| * H."""
    row = tl.program_id(0).to(tl.int64) * MERGERS + tl.arange(0, MERGERS)
    here = row < count
    reads = here
    if mask is not None:
        reads = here & (tl.load(mask + row, mask=here, other=0) != 0)
    temperature = temperature_of(tl.where(here, row, 0), temperatures, temperature_bits, PER_ROW)
    m = tl.full([MERGERS], LOWEST, tl.float32)
    s = tl.zeros([MERGERS], tl.float32)
    t = tl.zeros([MERGERS], tl.float32)
    m, s, t = merge_slices(states, slices, row, reads, m, s, t, tl.div_rn(LOG2_E, temperature))
    entropy, log_sum = finish(s, t, temperature)
    logprob = tl.zeros([MERGERS], tl.float32)
    if labels is not None:
        label = tl.load(labels + row, mask=reads, other=NO_TARGET).to(tl.int64)
        is_token = (label >= 0) & (label < columns)
        z = tl.load(row_start(logits, row, inner, outer_stride, inner_stride, STEP) + label, mask=reads & is_token)
        logprob = tl.div_rn(z.to(tl.float32) - m, temperature) - log_sum
        logprob = tl.where(
            is_token, logprob, tl.where(label == NO_TARGET, 0.0, float("nan"))
        )  # NaN for an invalid label
    tl.store(logprobs + row, tl.where(reads, logprob, 0.0), mask=here)
    tl.store(entropies + row, tl.where(reads, entropy, 0.0), mask=here)
    tl.store(maxima + row, tl.where(reads, m, 0.0), mask=here)
    tl.store(log_sums + row, tl.where(reads, log_sum, 0.0), mask=here)
    if keys is not None:
        advantage = tl.load(advantages + row // tokens_per_advantage, mask=here, other=0.0)
        key = order_key(tl.abs(advantage) * entropy)
        tl.store(keys + row, tl.where(reads, key, ABSENT), mask=here)


@triton.jit(do_not_specialize=[*PLACE, "count", "columns", "slices", "temperature_bits", "first_token"])
def merge_into_states(
    states, slices, count, logits, inner, outer_stride, inner_stride, columns, mask, labels, temperatures,
    temperature_bits, row_states, first_token, STEP: tl.constexpr, PER_ROW: tl.constexpr, MERGERS: tl.constexpr,
):  # fmt: skip
    """Merges the slices of a tile, which starts at ``first_token``, into the rows' states (m, S, T, label's logit)."""
    row = tl.program_id(0).to(tl.int64) * MERGERS + tl.arange(0, MERGERS)
    here = row < count
    temperature = temperature_of(tl.where(here, row, 0), temperatures, temperature_bits, PER_ROW)
    if mask is not None:
        here = here & (tl.load(mask + row, mask=here, other=0) != 0)
    state = row_states + 4 * row
    m = tl.load(state, mask=here, other=LOWEST)
    s = tl.load(state + 1, mask=here, other=0.0)
    t = tl.load(state + 2, mask=here, other=0.0)
    m, s, t = merge_slices(states, slices, row, here, m, s, t, tl.div_rn(LOG2_E, temperature))
    tl.store(state, m, mask=here)
    tl.store(state + 1, s, mask=here)
    tl.store(state + 2, t, mask=here)
    if labels is not None:
        place = tl.load(labels + row, mask=here, other=NO_TARGET).to(tl.int64) - first_token
        in_tile = here & (place >= 0) & (place < columns)
        z = tl.load(row_start(logits, row, inner, outer_stride, inner_stride, STEP) + place, mask=in_tile)
        tl.store(state + 3, z.to(tl.float32), mask=in_tile)


@triton.jit(do_not_specialize=["pieces", "count", "temperature_bits"])
def finish_states(
    row_states, pieces, count, temperatures, temperature_bits, logprobs, entropies, maxima, log_sums,
    PER_ROW: tl.constexpr, MERGERS: tl.constexpr,
):  # fmt: skip
    """Merges the pieces of each row from left to right, and computes the row's results. The label's logit comes from
    the first piece in which it is not NaN.
    """
    row = tl.program_id(0).to(tl.int64) * MERGERS + tl.arange(0, MERGERS)
    here = row < count
    temperature = temperature_of(tl.where(here, row, 0), temperatures, temperature_bits, PER_ROW)
    state = row_states + 4 * row
    m = tl.load(state, mask=here, other=0.0)
    s = tl.load(state + 1, mask=here, other=1.0)
    t = tl.load(state + 2, mask=here, other=0.0)
    z = tl.load(state + 3, mask=here, other=0.0)
    scale = tl.div_rn(LOG2_E, temperature)
    for _ in range(1, pieces):
        state += 4 * count.to(tl.int64)
        other_m = tl.load(state, mask=here, other=LOWEST)
        other_s = tl.load(state + 1, mask=here, other=0.0)
        other_t = tl.load(state + 2, mask=here, other=0.0)
        other_z = tl.load(state + 3, mask=here, other=0.0)
        m, s, t = merge(m, s, t, other_m, other_s, other_t, scale)
        z = tl.where(z == z, z, other_z)
    entropy, log_sum = finish(s, t, temperature)
    tl.store(logprobs + row, tl.div_rn(z - m, temperature) - log_sum, mask=here)
    tl.store(entropies + row, entropy, mask=here)
    tl.store(maxima + row, m, mask=here)
    tl.store(log_sums + row, log_sum, mask=here)


# ---- the ops ---------------------------------------------------------------------------------------------------------


def logprob_entropy(
    logits: Tensor,
    labels: Tensor | None,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return row_statistics(logits, labels, temperature, mask)


def logprob_entropy_no_grad(
    logits: Tensor,
    labels: Tensor | None,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return row_statistics(logits, labels, temperature, mask)[:2]


def row_statistics(
    logits: Tensor,
    labels: Tensor | None,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    **keys: Any,
) -> tuple[Tensor, ...]:
    """Computes logprob_entropy. With ``keys``, ``advantages`` and ``tokens_per_advantage``, also writes the order keys
    of |A| * H to the tensor ``keys``.
    """
    rows = Rows.of(logits)
    outputs = new_outputs(logits, logits.shape[:-1])
    if rows.total == 0:
        return tuple(outputs.values())
    of_rows = {"mask": contiguous(mask), **temperature_arguments(temperature)}
    states, slices = _slice_states(rows, **of_rows)
    keys = {"keys": None, "advantages": None, "tokens_per_advantage": 1, **keys}
    finish_rows[(triton.cdiv(rows.total, MERGERS),)](
        states, slices, rows.total, columns=rows.columns, labels=contiguous(labels), **rows.place(), **of_rows,
        **outputs, **keys, MERGERS=MERGERS, num_warps=launch.warps(MERGERS), **EXACT,
    )  # fmt: skip
    return tuple(outputs.values())


def softmax_state_(
    state: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> None:
    rows = Rows.of(logits)
    if rows.total == 0:
        return
    of_rows = {"mask": contiguous(mask), **temperature_arguments(temperature)}
    states, slices = _slice_states(rows, **of_rows)
    merge_into_states[(triton.cdiv(rows.total, MERGERS),)](
        states, slices, rows.total, columns=rows.columns, labels=contiguous(labels), **rows.place(), **of_rows,
        row_states=state, first_token=tile.first_token or 0, MERGERS=MERGERS, num_warps=launch.warps(MERGERS), **EXACT,
    )  # fmt: skip


def softmax_state_finish(state: Tensor, temperature: NumberOrTensor = ONE) -> tuple[Tensor, ...]:
    count = state.shape[-2]
    outputs = new_outputs(state, (count,))
    if count:
        finish_states[(triton.cdiv(count, MERGERS),)](
            state, 1 if state.dim() == 2 else state.shape[0], count,
            **temperature_arguments(temperature), **outputs,
            MERGERS=MERGERS, num_warps=launch.warps(MERGERS), **EXACT,
        )  # fmt: skip
    return tuple(outputs.values())


def _slice_states(rows: Rows, **of_rows: Any) -> tuple[Tensor, int]:
    slices = triton.cdiv(rows.columns, SLICE)
    states = torch.empty((rows.total * slices, 3), dtype=torch.float32, device=rows.tensor.device)
    if slices:
        reduce_slices[(rows.total * slices,)](
            columns=rows.columns, slices=slices, states=states, **rows.place(), **of_rows, VECTOR=rows.vector,
            LANES=LANES, IN_FLIGHT=IN_FLIGHT, SLICE=SLICE, num_warps=launch.warps(LANES), **EXACT,
        )  # fmt: skip
    return states, slices


def new_outputs(like: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Returns uninitialised outputs with one value for each row, in the order of the op's results."""
    names = "logprobs", "entropies", "maxima", "log_sums"
    return {name: torch.empty(shape, dtype=torch.float32, device=like.device) for name in names}
