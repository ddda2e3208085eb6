"""Log-probabilities at given ids of each row. The other ids are the row's tail, whose softmax state is separate
(csrc/ops/token_logprobs.h).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import ALL_TOKENS, ONE, NumberOrTensor, Tile
from .kernels import op
from .logprob_entropy import NO_TARGET, at_places, labels_of, places_in_tile
from .softmax_state import SLICE, add_logits, finish, log_probability, merge, row_blocks, sum_by_halves_, temperatures

NO_ID = -1  # in token_ids, where a row has fewer ids than others


@op()
def token_softmax_state_(
    state: Tensor,
    taken: Tensor,
    logits: Tensor,
    labels: Tensor | None,
    token_ids: Tensor,
    tile: Tile = ALL_TOKENS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> None:
    count, columns = len(state), logits.shape[-1]
    if columns == 0:
        return
    targets, each = labels_of(labels, count, logits), temperatures(temperature, count, logits)
    unmasked = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.reshape(-1)
    for rows, block in row_blocks(logits, min(columns, SLICE)):
        flat, before, read = block.flatten(0, -2), state[rows], unmasked[rows].unsqueeze(1)
        places, in_tile = places_in_tile(token_ids[rows].long(), tile, columns)
        z = flat.gather(1, places).float()
        taken[rows] = torch.where(in_tile & read, z, taken[rows])
        of_label, has_label = places_in_tile(targets[rows], tile, columns)
        label_logit = at_places(flat, of_label).where(has_label, before[:, 3])
        # An id in no column is written to an additional last column.
        rest = torch.cat([flat, flat.new_empty(len(flat), 1)], 1)
        rest.scatter_(1, torch.where(in_tile, places, columns), -math.inf)
        merged = add_logits(before[:, :3].T, rest[:, :columns], each[rows])
        state[rows] = torch.cat([merged, label_logit.unsqueeze(0)]).T.where(read, before)


def _fake_results(taken: Tensor, state: Tensor, **_: Any) -> tuple[Tensor, ...]:
    of_rows = (state.new_empty(state.shape[-2:-1]) for _ in range(5))
    return taken.new_empty(taken.shape[-2:]), *of_rows


@op(_fake_results)
def token_logprobs_finish(
    state: Tensor, taken: Tensor, token_ids: Tensor, temperature: NumberOrTensor = ONE
) -> tuple[Tensor, ...]:
    if state.dim() == 2:
        state, taken = state.unsqueeze(0), taken.unsqueeze(0)
    first, *others = state
    z, *more = taken
    each = temperatures(temperature, len(first), first)
    tail, label_logit = first[:, :3].T, first[:, 3]
    for shard, of_shard in zip(others, more, strict=True):
        tail = merge(tail, shard[:, :3].T, each)
        label_logit = label_logit.where(~label_logit.isnan(), shard[:, 3])
        z = z.where(~z.isnan(), of_shard)
    is_fill = token_ids == NO_ID
    distinct = z.masked_fill(is_fill | _is_repeated(token_ids), -math.inf)
    entropy, top, log_sum = finish(add_logits(tail, distinct, each), each)
    logprobs = log_probability(z, top.unsqueeze(1), log_sum.unsqueeze(1), each.unsqueeze(1))
    no_tail = tail[1] < 0.5
    tail_log_sum = tail[1].log().masked_fill(no_tail, -math.inf)
    tail_logprob = (tail[0] - top) / each + tail_log_sum - log_sum
    return (
        logprobs.masked_fill(is_fill, -math.inf),
        tail_logprob,
        log_probability(label_logit, top, log_sum, each),
        entropy,
        torch.where(no_tail, top, tail[0]),
        torch.where(no_tail, log_sum, tail_log_sum.masked_fill(log_sum.isnan(), math.nan)),
    )


def _is_repeated(token_ids: Tensor) -> Tensor:
    """Returns whether an id comes earlier in its row."""
    ordered, order = token_ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(token_ids, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeated).scatter_(1, order, repeated)


def _fake_gradient(tail_logprob: Tensor, token_ids: Tensor, **_: Any) -> tuple[Tensor, ...]:
    rows, ids = token_ids.shape
    return *(tail_logprob.new_empty(rows) for _ in range(3)), tail_logprob.new_empty(rows, ids + 1)


@op(_fake_gradient)
def token_logprobs_gradient(
    grad_logprobs: Tensor | None,
    grad_tail_logprob: Tensor | None,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    token_ids: Tensor,
    labels: Tensor | None,
    logprobs: Tensor,
    tail_logprob: Tensor,
    logprob: Tensor,
    entropy: Tensor,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    targets, each = labels_of(labels, len(entropy), entropy), temperatures(temperature, len(entropy), entropy)
    masked = torch.zeros_like(targets, dtype=torch.bool) if mask is None else ~mask
    none = torch.zeros_like(entropy)

    def of_rows(grad: Tensor | None) -> Tensor:
        return none if grad is None else grad.masked_fill(masked, 0)

    of_ids = torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs
    of_ids = of_ids.masked_fill((token_ids == NO_ID) | masked.unsqueeze(1), 0)
    of_label = of_rows(grad_logprob).masked_fill(targets == NO_TARGET, 0)
    of_tail, of_entropy = of_rows(grad_tail_logprob), of_rows(grad_entropy)
    still = ~(of_ids != 0).any(1) & (of_label == 0) & (of_tail == 0) & (of_entropy == 0)

    has_tail = ~(tail_logprob == -math.inf)
    undefined = tail_logprob.isnan() | ((of_label != 0) & logprob.isnan())
    of_tail = of_tail.where(has_tail, 0)
    # The sum starts with a zero, since a row may have no ids.
    all_grads = sum_by_halves_(torch.cat([none.unsqueeze(1), of_ids], 1)) + of_tail + of_label
    all_grads = all_grads.masked_fill(undefined, math.nan)
    of_tail_logprob = tail_logprob.masked_fill(undefined, math.nan)
    tail = of_tail_logprob.exp()

    def shared(at: Tensor, all_grads: Tensor, of_entropy: Tensor, entropy: Tensor) -> Tensor:
        p = at.exp()
        term = p * (all_grads + of_entropy * (at + entropy))
        return term.masked_fill((p == 0) | ((all_grads == 0) & (of_entropy == 0)), 0)

    columns = (values.unsqueeze(1) for values in (all_grads, of_entropy, entropy))
    is_label = (token_ids == targets.unsqueeze(1)) & (targets != NO_TARGET).unsqueeze(1)
    own = _sums_of_equal_ids(token_ids, of_ids) + torch.where(is_label, of_label.unsqueeze(1), 0)
    values = (own - shared(logprobs, *columns)) / each.unsqueeze(1)
    in_tail = of_tail * (logprob - of_tail_logprob).exp()
    at_label = (
        of_label + in_tail.masked_fill(of_tail == 0, 0) - shared(logprob, all_grads, of_entropy, entropy)
    ) / each
    at_label = at_label.masked_fill(targets == NO_TARGET, 0)
    if token_ids.shape[1]:
        place = is_label.int().argmax(1, keepdim=True)
        at_label = torch.where(is_label.any(1), values.gather(1, place).squeeze(1), at_label)
    results = (
        (all_grads * tail - of_tail).where(has_tail, 0),
        (of_entropy * tail).where(has_tail, 0),
        (entropy + of_tail_logprob).where(has_tail, 0),
        torch.cat([values, at_label.unsqueeze(1)], 1),
    )
    return tuple(result.masked_fill(still if result.dim() == 1 else still.unsqueeze(1), 0) for result in results)


_PAIRS = 3 << 20  # the number of pairs of ids that are compared at a time


def _sums_of_equal_ids(token_ids: Tensor, values: Tensor) -> Tensor:
    """Returns, for each id, the sum of the values of all equal ids of its row."""
    count, width = token_ids.shape
    sums = torch.empty_like(values)
    step = max(1, _PAIRS // max(1, width * width))
    for begin in range(0, count, step) if width else ():
        ids, of_ids = token_ids[begin : begin + step], values[begin : begin + step]
        equal = ids.unsqueeze(2) == ids.unsqueeze(1)
        sums[begin : begin + step] = sum_by_halves_(torch.where(equal, of_ids.unsqueeze(1), 0))
    return sums


@op()
def put_token_gradients_(
    gradient: Tensor, token_ids: Tensor, labels: Tensor | None, values: Tensor, tile: Tile = ALL_TOKENS
) -> None:
    columns = gradient.shape[-1]
    if columns == 0 or not gradient.numel():
        return
    ids = torch.cat([token_ids.long(), labels_of(labels, len(token_ids), gradient).unsqueeze(1)], 1)
    places, in_tile = places_in_tile(ids, tile, columns)
    in_tile &= ids >= 0
    for rows, flat in row_blocks(gradient, columns):
        # An id in no column writes its row's first id again or, if that is in no column either, what is there.
        at, inside = places[rows], in_tile[rows]
        some = inside.int().argmax(1, keepdim=True)
        value = torch.where(
            inside.any(1, keepdim=True), values[rows].gather(1, some), flat.gather(1, at[:, :1]).float()
        )
        written = torch.where(inside, values[rows], value).to(flat.dtype)
        flat.scatter_(1, torch.where(inside, at, at.gather(1, some)), written)
