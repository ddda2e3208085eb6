"""The k largest log-probabilities of each row: of logits, of the LM head, and over vocabulary shards.

The k largest logits of a row are kept as entries, and all others, the row's tail, are merged into a softmax state
(``csrc/ops/topk_logprobs.h``). Both are made tile by tile. Then the results are computed as at given ids.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NO_GROUP, ONE, NumberOrTensor, ShardArguments, of_schema
from .._arguments.checks import require_readable, require_tensors
from .._dispatch import ops
from .._dispatch.faults import look
from .._dispatch.libraries import named
from .._dispatch.over_supports import TEMPERATURE_AND_MASK
from .._dispatch.registration import declare, refuse_unreadable, register_no_gradient
from .._segments.topk_entry import NO_ENTRY, ids_of, logits_of
from .forward import PackedRows, Picked, no_logits
from .op import HEAD, SHARD, head_arguments, problem_of
from .problem import HeadProblem, Shard
from .products import without_autocast
from .tiles import tiles_of_logits

_op = torch.ops.d3s_kernels

MOST = 1024  # the maximum of k


class TopkLogprobs(NamedTuple):
    """The results of :func:`topk_logprobs` and :func:`linear_topk_logprobs`. None of them has a gradient."""

    token_ids: Tensor
    """int32 ``[..., k]``: the ids of the k largest logits of each row, the largest first. Of equal logits, the lower id
    comes first. NaN is never among them; where a row has fewer than k numbers, the id is -1."""
    logprobs: Tensor
    """float32 ``[..., k]``: the log-probabilities of these ids, in nats."""
    tail_logprob: Tensor
    """float32 ``[...]``: the logarithm of the total probability of all other ids. It is computed from these ids, and
    not as 1 minus the sum of the k largest. It is ``-inf`` if the other ids have no probability."""
    entropy: Tensor
    """float32 ``[...]``: the entropy of the row over the whole vocabulary."""

    @classmethod
    def of_no_row(cls, token_ids: Tensor, number: float) -> TopkLogprobs:
        """Makes the results of rows that are masked out, or of more rows than a bound allows."""
        logprobs = torch.full(token_ids.shape, number, dtype=torch.float32, device=token_ids.device)
        of_rows = (logprobs.new_full(token_ids.shape[:-1], number) for _ in range(2))
        return cls(token_ids.fill_(-1), logprobs, *of_rows)

    def viewed(self, shape: torch.Size) -> TopkLogprobs:
        """Returns the results of flat rows as those of rows ``[...]``."""
        return TopkLogprobs(*(result.view((*shape, *result.shape[1:])) for result in self))

    def masked_(self, mask: Tensor) -> TopkLogprobs:
        """Writes the results of masked rows."""
        for result in self:
            number = -1 if result is self.token_ids else 0
            result.masked_fill_(~mask if result.dim() == 1 else ~mask.unsqueeze(1), number)
        return self


class Largest(NamedTuple):
    """The entries of the k largest logits of rows, and the softmax states of all others. Both change tile by tile."""

    state: Tensor  # [rows, 4]
    entries: Tensor  # int64 [rows, k], the largest first

    @classmethod
    def nothing(cls, rows: int, k: int, like: Tensor) -> Largest:
        entries = torch.full((rows, k), NO_ENTRY, dtype=torch.int64, device=like.device)
        return cls(no_logits(rows, like), entries)

    def finished(self, shard: Shard, temperature: NumberOrTensor) -> TopkLogprobs:
        """Computes the results of rows. Ranks exchange states and entries at once."""
        state, entries = self
        logits = logits_of(entries)
        if shard.ranks is not None and len(state):
            state, entries, logits = self._of_all_ranks(shard, temperature)
        ids = ids_of(entries)
        logprobs, tail_logprob, _, entropy, _, _ = _op.token_logprobs_finish.default(state, logits, ids, *temperature)
        # A row with NaN may have fewer than k numbers, and -1 is an id with the log-probability -inf.
        return TopkLogprobs(ids, logprobs.masked_fill_(entropy.isnan().unsqueeze(1), torch.nan), tail_logprob, entropy)

    def _of_all_ranks(self, shard: Shard, temperature: NumberOrTensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the ranks' states, followed by the state of the entries that are not among the k largest of all
        ranks; these k entries; and their logits for each of these states.
        """
        rows, k = self.entries.shape
        together = shard.everyones(torch.cat([self.state.view(torch.int64), self.entries], 1))
        shards = together[..., :2].contiguous().view(torch.float32)
        of_ranks = together[..., 2:].transpose(0, 1).reshape(rows, -1)
        in_order = of_ranks.sort(descending=True).values  # all entries differ, except for empty ones
        entries, others = in_order[:, :k].contiguous(), in_order[:, k:].contiguous()
        outside = no_logits(rows, self.state)
        _op.softmax_state_.default(outside, logits_of(others), None, None, *temperature)
        state = torch.cat([shards, outside.unsqueeze(0)])
        # The logits of all ranks are known here, so each state has them.
        return state, entries, logits_of(entries).expand(len(state), -1, -1).contiguous()


def require_k(k: int, tokens: int | None) -> None:
    """Checks k. ``tokens`` is the size of the vocabulary, or None if it is unknown."""
    if not 1 <= k <= MOST or (tokens is not None and k > tokens):
        of_vocabulary = "" if tokens is None else f", and at most the size of the vocabulary, {tokens}"
        raise ValueError(f"k: got {k}; takes 1 to {MOST}{of_vocabulary}")


_RESULTS = "Tensor token_ids, Tensor logprobs, Tensor tail_logprob, Tensor entropy"


def _fake_results(rows: Tensor, k: int) -> tuple[Tensor, ...]:
    of_rows = (rows.new_empty(rows.shape[:-1], dtype=torch.float32) for _ in range(2))
    shape = *rows.shape[:-1], k
    return rows.new_empty(shape, dtype=torch.int32), rows.new_empty(shape, dtype=torch.float32), *of_rows


# ---- of logits ------------------------------------------------------------------------------------------------------


def _of_logits(
    logits: Tensor,
    k: int,
    of_shard: ShardArguments = NO_GROUP,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    shard, shape = Shard.of(*of_shard), logits.shape[:-1]
    require_k(k, logits.shape[-1] if shard.ranks is None and logits.dim() > 0 else None)
    largest = Largest.nothing(shape.numel(), k, logits)
    _op.topk_softmax_state_.default(*largest, logits, shard.tile_start, *temperature, mask)
    results = largest.finished(shard, temperature.map_rows(lambda each: each.reshape(-1)))
    return (results if mask is None else results.masked_(mask.reshape(-1))).viewed(shape)


_results_of_logits = of_schema(_of_logits)


@torch.no_grad()
def _looked_at(*arguments: Any) -> tuple[Tensor, ...]:
    if not arguments[0].is_cpu:  # on a CPU, the steps of the op check the values
        look("topk_logprobs", named("topk_logprobs", arguments))
    results: tuple[Tensor, ...] = _results_of_logits(*arguments)
    return results


declare(
    f"topk_logprobs(Tensor logits, SymInt k, {SHARD}, {TEMPERATURE_AND_MASK}) -> ({_RESULTS})",
    _looked_at,
    lambda logits, k, *_: _fake_results(logits, k),
)

refuse_unreadable("topk_logprobs")
register_no_gradient("topk_logprobs")

_topk_logprobs = ops.function_of("topk_logprobs")


def topk_logprobs(
    logits: Tensor, k: int, shard: Shard, temperature: tuple[float, Tensor | None], mask: Tensor | None
) -> TopkLogprobs:
    return TopkLogprobs(*_topk_logprobs(logits, k, *shard.arguments, *temperature, mask))


# ---- of the LM head -------------------------------------------------------------------------------------------------


@without_autocast
def _forward(problem: HeadProblem, k: int) -> tuple[Tensor, ...]:
    shape, rows = problem.labels.shape, PackedRows.of(problem)
    if rows is None:
        return TopkLogprobs.of_no_row(problem.hidden.new_empty((*shape, k), dtype=torch.int32), torch.nan)
    temperature, largest = rows.temperature, Largest.nothing(len(rows.hidden), k, rows.hidden)
    for r, first, logits in tiles_of_logits(problem, rows.hidden):
        _op.topk_softmax_state_.default(
            largest.state[r], largest.entries[r], logits, first, *temperature.map_rows(itemgetter(r))
        )
    results = largest.finished(problem.shard, temperature)
    return (results if rows.picked is None else _scattered(rows.picked, results, problem.rows)).viewed(shape)


def _scattered(picked: Picked, results: TopkLogprobs, rows: int) -> TopkLogprobs:
    """Writes the results of the picked rows back to their rows, as :meth:`Picked.scatter` does."""
    ids, *floats = results
    (ids,) = picked._replace(exceeded=None).scatter((ids + 1,), rows)
    ids -= 1  # of the other rows, -1
    if picked.exceeded is not None:
        ids.masked_fill_(picked.exceeded, -1)
    return TopkLogprobs(ids, *picked.scatter(tuple(floats), rows))


def no_labels(hidden: Tensor) -> Tensor:
    """Returns labels which say that no row has a label. A problem needs labels; here, they are not read."""
    require_tensors(hidden=hidden)
    require_readable(hidden=hidden)
    return torch.full((), -100, device=hidden.device).expand(hidden.shape[:-1])


@torch.no_grad()
def _forward_kernel(k: int, *arguments: Any) -> tuple[Tensor, ...]:
    given = named("linear_topk_logprobs", (k, *arguments))
    problem = problem_of(**{name: value for name, value in given.items() if name != "k"})
    problem.check()
    require_k(k, problem.weight.shape[0] if problem.shard.ranks is None else None)
    if not problem.hidden.is_cpu and problem.shard.ranks is None:  # on a CPU, the op itself checks the values
        look("topk_logprobs", given)
    try:
        return _forward(problem, k)
    except RuntimeError:
        problem.require_memory()
        raise


declare(
    f"linear_topk_logprobs(SymInt k, {HEAD}, {SHARD}) -> ({_RESULTS})",
    _forward_kernel,
    lambda k, hidden, *_: _fake_results(hidden, k),
)
refuse_unreadable("linear_topk_logprobs")
register_no_gradient("linear_topk_logprobs")

_linear_topk_logprobs = ops.function_of("linear_topk_logprobs")


def linear_topk_logprobs(problem: HeadProblem, k: int) -> TopkLogprobs:
    return TopkLogprobs(*_linear_topk_logprobs(k, *head_arguments(problem), *problem.shard.arguments))
