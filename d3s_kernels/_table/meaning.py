"""The meaning of the ops that have no public function: the steps of other ops, and the backward passes.

As in ``d3s_kernels/reference.py``, the code has the ops' own names and arguments, and takes one row or segment after
the other in plain PyTorch and float64. A tensor that an op writes is passed with its old values, and returned with the
new ones. The arguments of an op that has many are one object, with the defaults of its schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._dispatch.libraries import schema_of
from ..sampling import SamplingMask

NO_TARGET = -100
LOWEST = torch.finfo(torch.float32).min  # the maximum of no logits
KEY_BITS = 32
NONE_KEPT = 2**32 - 1  # instead of the lowest kept key, if none is kept


class Given(SimpleNamespace):
    """The arguments of an op, by their names in its schema."""

    def but(self, **others: Any) -> Given:
        return Given(**(vars(self) | others))


def of_op(op: str) -> Callable[[Callable[[Given], Any]], Callable[..., Any]]:
    """Lets a meaning be called by the names of the op's arguments; those not given have the default of the schema."""

    def decorate(meaning: Callable[[Given], Any]) -> Callable[..., Any]:
        defaults = {argument.name: argument.default_value for argument in schema_of(op).arguments}
        return lambda **given: meaning(Given(**(defaults | given)))

    return decorate


# ---- softmax states -------------------------------------------------------------------------------------------------


def no_logits(rows: int) -> Tensor:
    """The initial states (m, S, T, the label's logit), float32 [rows, 4]."""
    return torch.tensor([[LOWEST, 0.0, 0.0, math.nan]]).repeat(rows, 1)


def temperatures(of: Given, rows: int) -> Tensor:
    """One temperature for each row, float64 [rows]."""
    if of.temperature_tensor is None:
        return torch.full((rows,), of.temperature, dtype=torch.float64)
    temperature: Tensor = of.temperature_tensor.double().reshape(-1).expand(rows)
    return temperature


@of_op("softmax_state_")
def softmax_state_(of: Given) -> Tensor:
    logits, rows = of.logits, len(of.state)
    if of.kept_of is not None and of.sampling_ids is not None:
        logits = spread(of, of.first_token)
    after, tile = of.state.double(), logits.double().reshape(rows, logits.shape[-1])
    row_temperature, kept = temperatures(of, rows), kept_tokens(of, rows)
    targets = targets_of(of.labels, rows).tolist()
    counted = [of.mask is None or bool(of.mask.reshape(-1)[row]) for row in range(rows)]
    exceeded = exceeds_bound(of)
    for row, tokens in enumerate(kept):
        if not counted[row]:
            continue
        if exceeded:
            after[row, 2] = math.nan
            continue
        if of.kept_of is not None and tokens is None:  # its logits are not there
            continue
        single = tokens is not None and len(tokens) == 1  # its logit is not read
        of_tile = range(of.first_token, of.first_token + tile.shape[1])
        own = [token - of.first_token for token in (of_tile if tokens is None else tokens) if token in of_tile]
        values = torch.zeros(len(own), dtype=torch.float64) if single else tile[row, own]
        after[row, :3] = _merged(after[row, :3], _state_of(values, row_temperature[row]), row_temperature[row])
        if targets[row] - of.first_token in own:
            after[row, 3] = values[own.index(targets[row] - of.first_token)]
    return after


def exceeds_bound(of: Given) -> bool:
    """Whether more unmasked rows than the bound have an empty span."""
    if of.sampling_offsets is None or of.max_dense_rows is None:
        return False
    dense = of.sampling_offsets.diff() == 0
    return bool((dense if of.mask is None else dense & of.mask.reshape(-1)).sum() > of.max_dense_rows)


def targets_of(labels: Tensor | None, rows: int) -> Tensor:
    return torch.full((rows,), NO_TARGET) if labels is None else labels.flatten().long()


def kept_tokens(of: Given, rows: int) -> list[list[int] | None]:
    """The tokens of each row's set; None for all tokens."""
    if of.sampling_ids is None:
        return [None] * rows
    spans = [of.sampling_ids[begin:end].tolist() for begin, end in pairwise(of.sampling_offsets.tolist())]
    for span, target in zip(spans, targets_of(of.labels, rows).tolist(), strict=True):
        if span and of.include_label and target != NO_TARGET and target not in span:
            span.append(target)
    return [span or None for span in spans]


def _state_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """(m, S, T) as in csrc/core/softmax_state.h."""
    top = torch.cat([logits, logits.new_tensor([LOWEST])]).max()
    distance = logits - top
    e = torch.exp(distance / temperature)
    terms = torch.where(e > 0, distance * e, e)  # a logit of -inf contributes 0
    return torch.stack([top, e.sum(), terms.sum()])


def _merged(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    top = torch.maximum(one[0], other[0])
    total, dot = torch.zeros_like(top), torch.zeros_like(top)
    for maximum, own, own_dot in (one, other):
        factor = torch.exp((maximum - top) / temperature)
        total += factor * own
        dot += torch.where(factor > 0, factor * (own_dot + (maximum - top) * own), factor)
    return torch.stack([top, total, dot])


@of_op("softmax_state_finish")
def softmax_state_finish(of: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    state = of.state
    pieces = state.double() if state.dim() == 3 else state.double().unsqueeze(0)
    row_temperature = temperatures(of, state.shape[-2])
    results = []
    for row in range(state.shape[-2]):
        merged = pieces[0, row, :3]
        for piece in pieces[1:, row, :3]:
            merged = _merged(merged, piece, row_temperature[row])
        known = pieces[:, row, 3][~pieces[:, row, 3].isnan()]
        top, total, dot = merged
        undefined = total < 0.5 or dot.isnan()  # only -inf; or NaN or inf
        log_sum = torch.tensor(math.nan).double() if undefined else total.log()
        entropy = log_sum - dot / (row_temperature[row] * total)
        logit = known[0] if len(known) else torch.tensor(math.nan)
        results.append(torch.stack([(logit - top) / row_temperature[row] - log_sum, entropy, top, log_sum]))
    found = torch.stack(results) if results else torch.empty(0, 4, dtype=torch.float64)
    logprob, entropy, top, log_sum = found.unbind(1)
    return logprob, entropy, top, log_sum


def _sampling_mask(of: Given) -> SamplingMask | None:
    return None if of.sampling_ids is None else SamplingMask(of.sampling_ids, of.sampling_offsets)


def _row_statistics(of: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The public logprob_entropy, with the two numbers that its backward needs: the maximum, and log S."""
    logits, mask = of.logits, of.mask
    row_temperature = of.temperature if of.temperature_tensor is None else of.temperature_tensor
    targets = torch.full(logits.shape[:-1], NO_TARGET, device=logits.device) if of.labels is None else of.labels
    logprob, entropy = reference.logprob_entropy(
        logits, targets, temperature=row_temperature, mask=mask, sampling_mask=_sampling_mask(of),
        label_outside="include" if of.include_label else "nan", max_dense_rows=of.max_dense_rows,
    )  # fmt: skip
    read = logits.detach() if mask is None else logits.detach().masked_fill(~mask.unsqueeze(-1), 0)
    read = _only_kept(read, kept_tokens(of, targets.numel()))
    top = read.double().amax(-1)
    scaled = (read.double() - top.unsqueeze(-1)) / torch.as_tensor(
        row_temperature, device=logits.device
    ).double().unsqueeze(-1)
    undefined = entropy.detach().isnan()  # then the maximum may be anything
    statistics = top.masked_fill(undefined, math.nan), scaled.exp().sum(-1).log().masked_fill(undefined, math.nan)
    top, log_sum = (part if mask is None else part.masked_fill(~mask, 0) for part in statistics)
    return logprob, entropy, top, log_sum


def _only_kept(logits: Tensor, kept: Sequence[list[int] | None], first_token: int = 0) -> Tensor:
    """The logits with -inf for tokens that are not kept, and 0 for a single one that is."""
    only = logits.clone().reshape(-1, logits.shape[-1])
    for row, tokens in zip(only, kept, strict=True):
        if tokens is not None:
            places = [token - first_token for token in tokens if 0 <= token - first_token < len(row)]
            values = torch.zeros(len(places), dtype=row.dtype) if len(tokens) == 1 else row[places]
            row.fill_(-math.inf)[places] = values
    return only.view(logits.shape)


row_statistics = of_op("logprob_entropy")(_row_statistics)


@of_op("logprob_entropy")
def logprob_entropy(of: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits of all tokens; or of kept tokens alone, where a row with an empty span gives 0."""
    if of.kept_of is None:
        return _row_statistics(of)
    found = _row_statistics(of.but(logits=spread(of)))
    if exceeds_bound(of):
        return found
    dense = of.sampling_offsets.diff() == 0
    logprob, entropy, top, log_sum = (part.masked_fill(dense, 0) for part in found)
    return logprob, entropy, top, log_sum


def _logprob_entropy_backward(of: Given) -> Tensor:
    """dz = (g_logprob (1{y} - p) - g_entropy p (log p + H)) / t, for the tokens from first_token on."""
    shape, rows, first_token = of.logits.shape, math.prod(of.logits.shape[:-1]), of.first_token or 0
    kept = kept_tokens(of, rows)
    single = torch.tensor([own is not None and len(own) == 1 for own in kept], dtype=torch.bool)
    z = _only_kept(of.logits, kept, first_token).double().reshape(rows, shape[-1])
    row_temperature = temperatures(of, rows).unsqueeze(1)
    top, log_total, h = (part.double().reshape(rows, 1) for part in (of.row_max, of.log_sum, of.entropy))
    targets = targets_of(of.labels, rows)
    of_logprob, of_entropy = (part.double().unsqueeze(1) for part in _incoming(of, targets))
    log_p = (z - top) / row_temperature - log_total
    p = log_p.exp()
    at_label = (torch.arange(shape[-1]) + first_token).unsqueeze(0) == targets.unsqueeze(1)
    of_terms = torch.where(p > 0, p * (log_p + h), p)
    gradient = (of_logprob * (at_label.double() - p) - of_entropy * of_terms) / row_temperature
    still = (of_logprob == 0) & (of_entropy == 0)
    still |= single.unsqueeze(1) & ~(log_total + of_logprob + of_entropy).isnan()
    if of.mask is not None:
        still |= ~of.mask.reshape(-1, 1)
    return gradient.masked_fill(still, 0).view(shape)


def _incoming(of: Given, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the log-probability of rows with a label and of the entropy, [rows]."""
    none = torch.zeros(targets.shape)
    of_logprob = none if of.grad_logprob is None else of.grad_logprob.reshape(-1).masked_fill(targets == NO_TARGET, 0)
    return of_logprob, none if of.grad_entropy is None else of.grad_entropy.reshape(-1)


logprob_entropy_backward = of_op("logprob_entropy_backward")(_logprob_entropy_backward)


@of_op("logprob_entropy_backward_")
def logprob_entropy_backward_(of: Given) -> Tensor:
    """Takes the logits before they are overwritten."""
    return _logprob_entropy_backward(of.but(mask=None, sampling_ids=None))


# ---- the LM head ----------------------------------------------------------------------------------------------------


def wide_product_(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return hidden.double() @ weight.double().T


@of_op("kept_logits")
def kept_logits(of: Given) -> Tensor:
    logits = reference._head_logits(of.hidden, of.weight, of.bias, of.logit_softcap).double()
    out = torch.full((len(of.sampling_ids) + len(of.labels),), -math.inf, dtype=torch.float64)
    for row, places in enumerate(places_of_rows(of)):
        for place, token in places.items() if len(places) > 1 and (of.mask is None or of.mask[row]) else ():
            if 0 <= token - of.first_token < len(of.weight):
                out[place] = logits[row, token - of.first_token]
    return out


def places_of_rows(of: Given) -> list[dict[int, int]]:
    """The token at each place of a row: those of its span, and then that of its label, if that joins."""
    found, spans = [], list(pairwise(of.sampling_offsets.tolist()))
    for row, tokens in enumerate(kept_tokens(of, len(spans))):
        begin, end = spans[row]
        found.append(dict(zip([*range(begin, end), len(of.sampling_ids) + row], tokens or [], strict=False)))
    return found


def spread(of: Given, first_token: int = 0) -> Tensor:
    """Rows of ``kept_of`` logits, from those of kept tokens alone; 0 for other tokens and for a row's only one."""
    rows = torch.zeros(len(of.logits), of.kept_of, dtype=torch.float64)
    for row, places in enumerate(places_of_rows(of)):
        for place, token in places.items() if len(places) > 1 else ():
            if 0 <= token - first_token < of.kept_of:
                rows[row, token - first_token] = of.logits[row, place]
    return rows


@of_op("kept_logits_backward")
def kept_logits_backward(of: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, places = of.first_token or 0, of.logits.shape[1]
    gradients = _logprob_entropy_backward(of.but(logits=spread(of, first)))
    of_logprob, of_entropy = _incoming(of, targets_of(of.labels, len(of.entropy)))
    active = ((of_logprob != 0) | (of_entropy != 0)) & (of.sampling_offsets.diff() > 0)
    active = active if of.mask is None else active & of.mask
    undefined = active & (of.log_sum + of_logprob + of_entropy).isnan()
    grad, rows, tokens = torch.zeros(places).double(), torch.full((places,), -1), torch.zeros(places).long()
    for row, of_row in enumerate(places_of_rows(of)):
        for place, token in of_row.items() if active[row] and (undefined[row] or len(of_row) > 1) else ():
            if 0 <= token - first < of.kept_of:
                z = of.logits[row, place].double()
                slope = 1.0 if of.logit_softcap is None else 1 - (z / of.logit_softcap) ** 2
                rows[place], tokens[place] = row, token - first
                grad[place] = math.nan if undefined[row] else gradients[row, token - first] * slope
    return grad, rows.int(), tokens.int(), undefined


def kept_hidden_grad_(
    grad: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor, offsets: Tensor, undefined: Tensor, out: Tensor
) -> Tensor:
    after = out.double().masked_fill((offsets.diff() > 0).unsqueeze(1), 0)
    for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        if row >= 0:
            after[row] += grad[place].double() * weight[token].double()
    return after.masked_fill(undefined.unsqueeze(1), math.nan)


def kept_weight_grad_(
    grad: Tensor, hidden: Tensor, rows: Tensor, tokens: Tensor, out: Tensor, bias_out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    after, of_bias = out.double(), None if bias_out is None else bias_out.double()
    for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        if row >= 0:
            after[token] += grad[place].double() * hidden[row].double()
            if of_bias is not None:
                of_bias[token] += grad[place].double()
    return after, of_bias


def _head_statistics(of: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprob, entropy = reference.linear_logprob_entropy(
        of.hidden, of.weight, of.labels, bias=of.bias,
        temperature=of.temperature if of.temperature_tensor is None else of.temperature_tensor,
        logit_softcap=of.logit_softcap, mask=of.mask, max_rows=of.max_rows, max_grad_rows=of.max_grad_rows,
        sampling_mask=_sampling_mask(of), label_outside="include" if of.include_label else "nan",
        max_dense_rows=of.max_dense_rows,
    )  # fmt: skip
    logits = reference._head_logits(of.hidden.detach(), of.weight.detach(), of.bias, of.logit_softcap)
    top, log_sum = _row_statistics(of.but(logits=logits))[2:]
    exceeded = logprob.detach().isnan() & entropy.detach().isnan()
    return logprob, entropy, top.masked_fill(exceeded, math.nan), log_sum.masked_fill(exceeded, math.nan)


head_statistics = of_op("linear_logprob_entropy")(_head_statistics)


@of_op("linear_logprob_entropy_backward")
def linear_logprob_entropy_backward(of: Given) -> tuple[Tensor | None, ...]:
    """Computed from the head's arguments alone, without the forward's results. None for a gradient not wanted."""
    leaves = {name: getattr(of, name) for name in ("hidden", "weight", "bias")}
    leaves = {name: None if leaf is None else leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        results = _head_statistics(of.but(**leaves, max_rows=None))
        given = [
            (result, grad.double())
            for result, grad in zip(results, (of.grad_logprob, of.grad_entropy), strict=False)
            if grad is not None
        ]
        wanted = [
            leaf if want and leaf is not None else None for leaf, want in zip(leaves.values(), of.wanted, strict=True)
        ]
        asked = [leaf for leaf in wanted if leaf is not None]
        found = iter(torch.autograd.grad([result for result, _ in given], asked, [grad for _, grad in given]))
    return tuple(None if leaf is None else next(found) for leaf in wanted)


# ---- the steps of a top-K search ------------------------------------------------------------------------------------


def topk_order_keys(
    scores: Tensor, advantages: Tensor | None = None, mask: Tensor | None = None, offsets: Tensor | None = None
) -> Tensor:
    """uint32 keys in the order of the scores, as int32 of the same bits; 0 for scores that are masked or NaN."""
    values = scores.float()
    if advantages is not None:
        values = reference._per_token(advantages, scores, offsets).float().abs() * values
    bits = (values + 0.0).contiguous().view(torch.int32).long()  # -0 and 0 share a key
    keys = torch.where(bits >= 0, bits + 2**31, -1 - bits)
    keys = torch.where(reference._usable(values, mask).view(values.shape), keys, 0)
    return torch.where(keys >= 2**31, keys - 2**32, keys).int()


def _keys_of_segments(keys: Tensor, offsets: Tensor | None) -> list[Tensor]:
    """The keys of each segment: int64, from 0 to 2^32 - 1."""
    flat = keys.flatten().long() & NONE_KEPT
    return [flat[begin:end] for begin, end in reference._segments(keys, offsets)]


def topk_count_digit(keys: Tensor, search: Tensor, shift: int, bits: int, offsets: Tensor | None = None) -> Tensor:
    """How many keys of each segment have each digit, among those that have the digits found so far."""
    counts = torch.zeros(len(search), 1 << bits, dtype=torch.int64)
    found = zip(_keys_of_segments(keys, offsets), search.tolist(), strict=True)
    for segment, (own, (prefix, _, k)) in enumerate(found):
        counted = own != 0
        if shift + bits < KEY_BITS:
            counted &= (own >> (shift + bits) == prefix) & (k > 0)
        counts[segment] = torch.bincount((own[counted] >> shift) % (1 << bits), minlength=1 << bits)
    return counts


def topk_choose_digit_(
    search: Tensor,
    counts: Tensor,
    shift: int,
    ratio: float | None = None,
    ratio_tensor: Tensor | None = None,
    k: int | None = None,
    k_tensor: Tensor | None = None,
) -> Tensor:
    """The search with one more digit of each segment's k-th largest key."""
    after, bins = search.clone(), counts.shape[1]
    for segment, numbers in enumerate(counts.tolist()):
        prefix, left, kept = search[segment].tolist()
        if shift + bins.bit_length() - 1 == KEY_BITS:
            share = ratio if ratio_tensor is None else ratio_tensor
            kept = reference._how_many(sum(numbers), share, k if k_tensor is None else k_tensor) if sum(numbers) else 0
            prefix, left = 0, kept
        if kept > 0:
            digit = bins - 1
            while numbers[digit] < left:
                left -= numbers[digit]
                digit -= 1
            prefix = prefix * bins + digit
        after[segment] = torch.tensor([prefix, left, kept])
    return after


def topk_mask_from_key(
    keys: Tensor, search: Tensor, ties: Tensor, offsets: Tensor | None = None, drop_zeros: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Marks the keys above the one that was found, and the first ``ties`` keys that equal it. Also returns how many
    zeros were dropped, and the lowest key that is kept.
    """
    masks = [torch.zeros(0, dtype=torch.bool)]
    zeros, lowest = [], []
    for own, (found, _, k), allowed in zip(
        _keys_of_segments(keys, offsets), search.tolist(), ties.tolist(), strict=True
    ):
        tie = own == found
        kept = ((own > found) | (tie & (tie.cumsum(0) <= allowed))) & (k > 0)
        dropped = kept & (own == 2**31) & drop_zeros
        kept = kept & ~dropped
        masks.append(kept)
        zeros.append(int(dropped.sum()))
        lowest.append(int(own[kept].min()) if kept.any() else NONE_KEPT)
    of_segments = torch.tensor([zeros, lowest], dtype=torch.int64)
    return torch.cat(masks).view(keys.shape), of_segments[0], of_segments[1]


# ---- ratios ---------------------------------------------------------------------------------------------------------


def importance_ratio_backward(
    grad_ratio: Tensor,
    ratio: Tensor,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    low: float = -20.0,
    high: float = 20.0,
) -> Tensor:
    """A ratio's derivative by its logarithm is the ratio itself; at a finite bound and beyond, it is 0. A gradient of 0
    stays 0, whatever the ratio is.
    """
    inside = reference._in_groups(ratio, mask, groups).view(ratio.shape)
    by = ratio.double()
    if low > -math.inf:
        inside &= by > math.exp(low)
    if high < math.inf:
        inside &= by < math.exp(high)
    return (grad_ratio.double() * by).masked_fill(~inside | (grad_ratio == 0), 0)
