"""The ops for the k largest log-probabilities: of logits, of the LM head, and their step."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from d3s_kernels._segments.topk_entry import NO_ENTRY
from d3s_kernels.check import tolerances

from .draw import Draw
from .head import head_arguments
from .logprobs import as_tile, rows_of_logits, states, without_supports
from .meaning import public, public_arguments
from .row import Arguments, detached, op


def _k(draw: Draw, vocabulary: int) -> int:
    return min(draw.choice((1, draw.length(1, vocabulary), vocabulary)), 1024)


def _rows(draw: Draw) -> Arguments:
    given = detached(without_supports(rows_of_logits(draw)))
    return given | {"k": _k(draw, given["logits"].shape[-1]), "first_token": 0, "group_name": None}


# ---- the step --------------------------------------------------------------------------------------------------------


def entry_of(logit: float, token: int) -> int:
    """The int64 entry of a logit and its id, as csrc/core/topk_entry.h defines it."""
    (bits,) = struct.unpack("i", struct.pack("f", logit + 0.0))
    return ((bits if bits >= 0 else bits ^ 0x7FFFFFFF) << 32) + (2**32 - 1 - token)


def logit_and_id(entry: int) -> tuple[float, int]:
    bits = entry >> 32
    (logit,) = struct.unpack("f", struct.pack("i", bits if bits >= 0 else bits ^ 0x7FFFFFFF))
    return logit, 2**32 - 1 - (entry & 0xFFFFFFFF)


def _row(
    state: Tensor, best: list[int], logits: list[float], first: int, temperature: float
) -> tuple[Tensor, list[int]]:
    """The state and the entries of one row after a tile, in float64."""
    rest = [z for z in logits if math.isnan(z)]
    entries = [entry_of(z, first + i) for i, z in enumerate(logits) if not math.isnan(z)]
    in_order = sorted([*entries, *best], reverse=True)
    k = len(best)
    rest += [logit_and_id(entry)[0] for entry in in_order[k:] if entry != NO_ENTRY]
    top, total, dot, label = state.double().tolist()
    z = torch.tensor(rest, dtype=torch.float64)
    largest = max([top, *(number for number in rest if not math.isnan(number))])
    moved = math.exp((top - largest) / temperature)
    e = torch.exp((z - largest) / temperature)
    terms = torch.where(z == -math.inf, 0.0, (z - largest) * e)
    before = dot + (top - largest) * total if moved > 0 else 0.0
    after = [largest, moved * total + float(e.sum()), moved * before + float(terms.sum()), label]
    return torch.tensor(after, dtype=torch.float64), in_order[:k]


def _step(
    state: Tensor, best: Tensor, logits: Tensor, first_token: int | None = None, **given: Any
) -> tuple[Tensor, ...]:
    count = len(state)
    flat = logits.float().reshape(count, logits.shape[-1])
    heat, mask = given.get("temperature_tensor"), given.get("mask")
    each = torch.full((count,), given.get("temperature") or 1.0) if heat is None else heat.expand(logits.shape[:-1])
    read = torch.ones(count, dtype=torch.bool) if mask is None else mask.reshape(-1)
    state, best = state.double(), best.clone()
    for row in range(count):
        if read[row]:
            temperature = float(each.reshape(-1)[row])
            after = _row(state[row], best[row].tolist(), flat[row].tolist(), first_token or 0, temperature)
            state[row], best[row] = after[0], torch.tensor(after[1])
    return state, best


@op(_step, results={"state": states, "best": tolerances.equal})
def topk_softmax_state_(draw: Draw) -> Arguments:
    """A tile, and the entries of the tiles before it."""
    given = _rows(draw)
    before = given["logits"]
    given = as_tile(draw, given | {"labels": None})
    first, rows = given["first_token"] or 0, len(given["state"])
    best = torch.full((rows, given["k"]), NO_ENTRY)
    if first and draw.flag():
        best = _step(given["state"], best, before[..., :first], 0)[1]
    return given | {"best": best}


# ---- of logits, and of the head --------------------------------------------------------------------------------------

_OF_LOGITS, _OF_HEAD = (tolerances.FUNCTIONS[name] for name in ("topk_logprobs", "linear_topk_logprobs"))


@op(public("topk_logprobs"), results=_OF_LOGITS.results, served_by="composed")
def topk_logprobs(draw: Draw) -> Arguments:
    return _rows(draw)


def _of_head(found: dict[str, Tensor], **given: Any) -> tuple[Any, ...]:
    return tolerances.topk_of_head(found, **public_arguments("linear_topk_logprobs", given))


def _rule(name: str) -> tolerances.Allowed:
    rule = _OF_HEAD.results[name]
    return lambda exact, arguments: rule(exact, public_arguments("linear_topk_logprobs", arguments))


@op(_of_head, results={name: _rule(name) for name in _OF_HEAD.results}, from_found=True, served_by="composed")
def linear_topk_logprobs(draw: Draw) -> Arguments:
    given = detached(head_arguments(draw)) | {"max_grad_rows": None, "first_token": 0, "group_name": None}
    return given | {"k": _k(draw, len(given["weight"]))}
