"""The backward of logprob_entropy in Triton: out of place or in place, for whole rows or for a tile, or for some of the
rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, GradientArguments, NumberOrTensor, Tile
from .launch import EXACT, contiguous, warps
from .logprob_entropy import NO_TARGET
from .rows import PLACE, Rows, row_start, temperature_arguments, temperature_of
from .softmax_state import LOG2_E, exponential

THREADS = 256
BLOCK = 8192  # elements in flight at the same time: 32 for each thread
EDGE_BLOCK = 1024  # elements of a block at the end of a piece, where an element needs registers for address and mask
PIECE = 4 * BLOCK  # elements for a program: enough to amortise the program's start-up cost
ANY_TOKEN = 2**62  # replaces the size of the vocabulary, which is unknown for a tile


@triton.jit(
    do_not_specialize=[
        *PLACE,
        *(f"out_{name}" for name in PLACE),
        "columns",
        "kept",
        "temperature_bits",
        "first_token",
        "vocabulary",
    ]
)
def write_gradients(
    logits, inner, outer_stride, inner_stride, columns, packed, kept, mask, labels, temperatures, temperature_bits,
    grad_logprob, grad_entropy, entropies, maxima, log_sums, first_token, vocabulary, out, out_inner, out_outer_stride,
    out_inner_stride,
    STEP: tl.constexpr, PER_ROW: tl.constexpr, OUT_STEP: tl.constexpr, BLOCK: tl.constexpr, EDGE_BLOCK: tl.constexpr,
    PIECE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of g_logprob * logprob(y) + g_entropy * H with respect to logits z, for a piece of a row.

        dz = (g_logprob (1{y} - p) - g_entropy p (log p + H)) / t

    dz is the exponential e^((z - m) / t) times a linear function of z - m, plus a term at the label. If a row has no
    gradient, its logits are not read. With NARROW, the gradient overwrites the front half of its own row: one program
    goes through the row from left to right, and overwrites only logits that all threads have read before the barrier.
    With ``packed``, row i is row packed[i] of the ``kept`` rows of logits. If an unchecked row does not exist, the
    gradient is NaN.
    """
    pieces = 1 if NARROW else tl.cdiv(columns, PIECE)
    row = tl.program_id(0).to(tl.int64) // pieces
    begin = (tl.program_id(0) % pieces) * PIECE
    end = columns if NARROW else tl.minimum(begin + PIECE, columns)
    place_of_row = row
    if packed is not None:
        place_of_row = tl.load(packed + row)
    start = row_start(logits, place_of_row, inner, outer_stride, inner_stride, STEP)
    out = row_start(out, row, out_inner, out_outer_stride, out_inner_stride, OUT_STEP)

    label = tl.full([], NO_TARGET, tl.int64)
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
    g_logprob = tl.full([], 0.0, tl.float32)
    if grad_logprob is not None:
        g_logprob = tl.where(label == NO_TARGET, 0.0, tl.load(grad_logprob + row))
    g_entropy = tl.full([], 0.0, tl.float32)
    if grad_entropy is not None:
        g_entropy = tl.load(grad_entropy + row)
    reads = (g_logprob != 0) | (g_entropy != 0)  # true for NaN, too
    if mask is not None:
        reads = reads & (tl.load(mask + row) != 0)
    unread = tl.full([], 0.0, tl.float32)  # the gradient of a row whose logits are not read
    if packed is not None:
        missing = (place_of_row < 0) | (place_of_row >= kept)
        unread = tl.where(reads & missing, float("nan"), unread)
        reads = reads & (missing == 0)

    temperature = temperature_of(row, temperatures, temperature_bits, PER_ROW)
    scale = tl.div_rn(LOG2_E, temperature)
    log_sum = tl.load(log_sums + row)
    weight = tl.div_rn(exponential(-log_sum), temperature)
    offset = -weight * (g_logprob + g_entropy * (tl.load(entropies + row) - log_sum))
    slope = tl.div_rn(-weight * g_entropy, temperature)
    # If the row's entropy or an incoming gradient is NaN, or if an unchecked label is no id of the vocabulary, m
    # becomes NaN, so that the whole gradient is NaN.
    bad = (log_sum != log_sum) | (g_logprob != g_logprob) | (g_entropy != g_entropy)
    bad = bad | ((g_logprob != 0) & (label != NO_TARGET) & ((label < 0) | (label >= vocabulary)))
    m = tl.where(bad, float("nan"), tl.load(maxima + row))

    whole = end - (end - begin) % BLOCK
    if reads:
        # The label's 1 - p needs a more accurate exponential. The label's logit is read before the loop, which
        # overwrites it if the op is in place. The label's gradient is written after the loop. No other program writes
        # to this piece.
        place = label - first_token
        has_label = (place >= begin) & (place < end)
        label_distance = tl.load(start + place, mask=has_label, other=0.0).to(tl.float32) - m
        tl.debug_barrier()
        for first in range(begin, whole, BLOCK):
            write_block(start, out, first, end, m, scale, offset, slope, BLOCK, False, NARROW)
        for first in range(whole, end, EDGE_BLOCK):
            write_block(start, out, first, end, m, scale, offset, slope, EDGE_BLOCK, True, NARROW)
        tl.debug_barrier()
        p = exponential(tl.div_rn(label_distance, temperature))
        rest = tl.where(p == 0, 0.0, p * tl.fma(slope, label_distance, offset))
        at_label = tl.div_rn(g_logprob, temperature) + rest
        tl.store(out + place, at_label.to(out.dtype.element_ty), mask=has_label)
    else:
        for first in range(begin, whole, BLOCK):
            write_number(out, first, end, unread, BLOCK, False)
        for first in range(whole, end, EDGE_BLOCK):
            write_number(out, first, end, unread, EDGE_BLOCK, True)


@triton.jit
def write_block(
    start, out, first, end, m, scale, offset, slope, BLOCK: tl.constexpr, EDGE: tl.constexpr, NARROW: tl.constexpr
):
    places = first + tl.arange(0, BLOCK)
    if EDGE:
        z = tl.load(start + places, mask=places < end, other=0.0)
    else:
        z = tl.load(start + places)
    distance = z.to(tl.float32) - m
    e = tl.exp2(distance * scale)
    gradient = e * tl.fma(slope, distance, offset)
    gradient = tl.where(e > 0, gradient, e).to(out.dtype.element_ty)  # 0 for a -inf logit, not 0 * inf; NaN stays
    if NARROW:
        tl.debug_barrier()
    if EDGE:
        tl.store(out + places, gradient, mask=places < end)
    else:
        tl.store(out + places, gradient)


@triton.jit
def write_number(out, first, end, number, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    places = first + tl.arange(0, BLOCK)
    numbers = tl.zeros([BLOCK], out.dtype.element_ty) + number.to(out.dtype.element_ty)
    if EDGE:
        tl.store(out + places, numbers, mask=places < end)
    else:
        tl.store(out + places, numbers)


def logprob_entropy_backward(
    given: GradientArguments,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    tile: Tile = ALL_TOKENS,
) -> Tensor:
    out = torch.empty(given.logits.shape, dtype=given.logits.dtype, device=given.logits.device)
    _write(given, out, tile, temperature, mask=mask)
    return out


def logprob_entropy_backward_(
    given: GradientArguments,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    grad_dtype: torch.dtype | None = None,
) -> None:
    out = logits = given.logits
    if grad_dtype is not None and grad_dtype != logits.dtype:
        out = logits.view(grad_dtype)[..., : logits.shape[-1]]
    _write(given, out, tile, temperature)


def logprob_entropy_backward_rows_(
    given: GradientArguments,
    rows: Tensor,
    grad_logits: Tensor,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
) -> None:
    _write(given, grad_logits, tile, temperature, packed=rows)


def _write(
    given: GradientArguments,
    out: Tensor,
    tile: Tile,
    temperature: NumberOrTensor,
    mask: Tensor | None = None,
    packed: Tensor | None = None,
) -> None:
    logits = given.logits
    rows, to = Rows.of(logits), Rows.of(out)
    narrow = out.dtype != logits.dtype and packed is None
    programs = to.total * (min(1, rows.columns) if narrow else triton.cdiv(rows.columns, PIECE))
    if programs == 0:
        return
    write_gradients[(programs,)](
        columns=rows.columns, labels=contiguous(given.labels), grad_logprob=contiguous(given.grad_logprob),
        grad_entropy=contiguous(given.grad_entropy), entropies=contiguous(given.entropy),
        maxima=contiguous(given.row_max), log_sums=contiguous(given.log_sum), first_token=tile.first_token or 0,
        vocabulary=logits.shape[-1] if tile == ALL_TOKENS else ANY_TOKEN, mask=contiguous(mask),
        packed=contiguous(packed), kept=rows.total,
        **temperature_arguments(temperature), **rows.place(), **to.place("out", "out_"),
        BLOCK=BLOCK, EDGE_BLOCK=EDGE_BLOCK, PIECE=PIECE, NARROW=narrow, num_warps=warps(THREADS), **EXACT,
    )  # fmt: skip
    if to.tensor is not out:  # in place, but Rows.of copied the rows because of their strides
        out.copy_(to.tensor)
