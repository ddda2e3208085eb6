"""Log-probabilities at given ids of each row: of logits, of the LM head, and over vocabulary shards.

The ids of a row that are not given are the row's tail. The forward merges the logits of the tail into softmax states
and takes out the logits at the given ids. In the backward, the gradient of the tail has the form of the gradient of
``logprob_entropy`` (``csrc/core/token_gradient.h``), so that the same code and kernels compute it; the gradients at the
given ids are then written over it.
"""

from __future__ import annotations

import math
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NO_GROUP, ONE, NumberOrTensor, ShardArguments, of_schema
from .._arguments.checks import is_known, require_readable, require_tensors
from .._dispatch import ops
from .._dispatch.faults import look
from .._dispatch.libraries import argument_names, named
from .._dispatch.over_supports import TEMPERATURE_AND_MASK
from .._dispatch.registration import (
    Gradient,
    declare,
    refuse_unreadable,
    register_gradient,
    register_no_second_derivative,
)
from .backward import AtTokens, Incoming, Wanted, of_active_rows
from .forward import PackedRows, no_logits
from .op import (
    HEAD,
    HEAD_SHARD,
    SHARD,
    AtBackward,
    HeadWithGradient,
    fake_gradients,
    fake_room,
    head_arguments,
    problem_of,
)
from .problem import HeadProblem, Shard
from .products import without_autocast
from .tiles import kept_logits, new_room_for_logits, tiles_of_logits

_op = torch.ops.d3s_kernels

_IN_NO_TILE = 2**31 - 1  # the label of rows of a tail, so that no term of a label is added to the tail's gradient


class TokenLogprobs(NamedTuple):
    """The results of :func:`token_logprobs` and :func:`linear_token_logprobs`, float32, in nats. All of them are
    differentiable.
    """

    logprobs: Tensor
    """``[..., K]``: the log-probability of each given id; ``-inf`` where ``token_ids`` is -1."""
    tail_logprob: Tensor
    """``[...]``: the logarithm of the total probability of all ids that are not given in the row. It is computed from
    these ids, and not as 1 minus the sum of the others, so it is accurate even if the given ids have nearly all of the
    probability. It is ``-inf`` if the row's other ids have no probability."""
    logprob: Tensor
    """``[...]``: the log-probability of the label; 0 without a label."""
    entropy: Tensor
    """``[...]``: the entropy of the row over the whole vocabulary."""


class Results(NamedTuple):
    """The results of the ops. The first four are public; the gradient is computed from all of them."""

    logprobs: Tensor
    tail_logprob: Tensor
    logprob: Tensor
    entropy: Tensor
    tail_max: Tensor
    tail_log_sum: Tensor


class Grads(NamedTuple):
    """The incoming gradients of the four public results."""

    logprobs: Tensor | None
    tail_logprob: Tensor | None
    logprob: Tensor | None
    entropy: Tensor | None


_RESULTS = ", ".join(f"Tensor {name}" for name in Results._fields)
_GRADS = ", ".join(f"Tensor? grad_{name}" for name in Grads._fields)


class Taken(NamedTuple):
    """The softmax states of the tails of rows, and the logits at the given ids. Both grow tile by tile."""

    state: Tensor  # [rows, 4]
    logits: Tensor  # [rows, K], NaN until the id's tile is merged

    @classmethod
    def nothing(cls, token_ids: Tensor, like: Tensor) -> Taken:
        logits = torch.full(token_ids.shape, torch.nan, dtype=torch.float32, device=like.device)
        return cls(no_logits(len(token_ids), like), logits)

    def finished(
        self, shard: Shard, token_ids: Tensor, labels: Tensor, mask: Tensor | None, temperature: NumberOrTensor
    ) -> Results:
        """Computes the results of rows, as in ``forward.finished``. Ranks exchange states and logits at once."""
        state, logits = self
        if shard.ranks is not None:
            both = shard.everyones(torch.cat([state, logits], 1))
            state, logits = both[..., :4].contiguous(), both[..., 4:].contiguous()
        results = Results(*_op.token_logprobs_finish.default(state, logits, token_ids, *temperature))
        results.logprob.masked_fill_(labels == -100, 0.0)
        if mask is not None:
            for result in results:
                result.masked_fill_(~mask if result.dim() == 1 else ~mask.unsqueeze(1), 0.0)
        return results


def _at_tokens(
    grads: Grads,
    token_ids: Tensor,
    labels: Tensor,
    results: Results,
    temperature: NumberOrTensor,
    mask: Tensor | None,
) -> tuple[Incoming, AtTokens]:
    """Returns the incoming gradients with which the gradient of the tail is computed, and the gradients at the ids. All
    arguments have one entry for each row.
    """
    of_logprob, of_entropy, entropy, values = _op.token_logprobs_gradient.default(
        *grads, token_ids, labels, *results[:4], *temperature, mask
    )
    incoming = Incoming(of_logprob, of_entropy, entropy, results.tail_max, results.tail_log_sum)
    return incoming, AtTokens(token_ids, labels, values)


def _flat(values: Tensor | None, rows: tuple[int, ...]) -> Any:
    """Returns values of rows in one dimension for the rows; their own dimensions stay."""
    return None if values is None else values.reshape(math.prod(rows), *values.shape[len(rows) :])


# ---- of logits ------------------------------------------------------------------------------------------------------


def _of_logits(
    logits: Tensor,
    token_ids: Tensor,
    labels: Tensor,
    of_shard: ShardArguments = NO_GROUP,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    shard, shape, ids = Shard.of(*of_shard), labels.shape, _flat(token_ids, labels.shape)
    taken = Taken.nothing(ids, logits)
    _op.token_softmax_state_.default(*taken, logits, labels, ids, shard.tile_start, *temperature, mask)
    temperature = temperature.map_rows(lambda each: each.reshape(-1))
    logprobs, *of_rows = taken.finished(shard, ids, _flat(labels, shape), _flat(mask, shape), temperature)
    return logprobs.view(token_ids.shape), *(result.view(shape) for result in of_rows)


def _gradient_of_logits(
    grad_logprobs: Tensor | None,
    grad_tail_logprob: Tensor | None,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    tail_logprob: Tensor,
    logprob: Tensor,
    entropy: Tensor,
    tail_max: Tensor,
    tail_log_sum: Tensor,
    of_shard: ShardArguments = NO_GROUP,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> Tensor:
    shape, first = labels.shape, of_shard[0]
    flat = partial(_flat, rows=shape)
    ids = flat(token_ids)
    grads = Grads(*map(flat, (grad_logprobs, grad_tail_logprob, grad_logprob, grad_entropy)))
    results = Results(*map(flat, (logprobs, tail_logprob, logprob, entropy, tail_max, tail_log_sum)))
    of_rows = temperature.map_rows(lambda each: each.reshape(-1))
    incoming, at_tokens = _at_tokens(grads, ids, flat(labels), results, of_rows, flat(mask))
    targets = torch.full(shape, _IN_NO_TILE, dtype=torch.int32, device=logits.device)
    grad_logprob, grad_entropy, *statistics = (values.view(shape) for values in incoming if values is not None)
    gradient: Tensor = _op.logprob_entropy_backward.default(
        grad_logprob, grad_entropy, logits, targets, *statistics, *temperature, mask, first
    )
    _op.put_token_gradients_.default(gradient.view(len(ids), logits.shape[-1]), ids, *at_tokens[1:], first)
    return gradient


_results_of_logits = of_schema(_of_logits)
_OF_LOGITS = "Tensor logits, Tensor token_ids, Tensor labels"
_AFTER = f"{SHARD}, {TEMPERATURE_AND_MASK}"


def _fake_results(rows: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
    of_rows = (rows.new_empty(rows.shape[:-1], dtype=torch.float32) for _ in range(5))
    return rows.new_empty(token_ids.shape, dtype=torch.float32), *of_rows


def _looked_at(*arguments: Any) -> tuple[Tensor, ...]:
    if not arguments[0].is_cpu:  # on a CPU, the steps of the op check the values
        look("token_logprobs", named("token_logprobs", arguments))
    results: tuple[Tensor, ...] = _results_of_logits(*arguments)
    return results


declare(
    f"token_logprobs({_OF_LOGITS}, {_AFTER}) -> ({_RESULTS})",
    _looked_at,
    lambda logits, token_ids, *_: _fake_results(logits, token_ids),
)
declare(
    f"token_logprobs_backward({_GRADS}, {_OF_LOGITS}, {_RESULTS}, {_AFTER}) -> (Tensor grad_logits)",
    of_schema(_gradient_of_logits),
    lambda *arguments: arguments[4].new_empty(arguments[4].shape),
)
register_gradient("token_logprobs", Gradient("token_logprobs", "token_logprobs_backward"))
register_no_second_derivative("token_logprobs_backward")
refuse_unreadable("token_logprobs")

_of_logits_and_ids = ops.function_of("token_logprobs")


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    labels: Tensor,
    shard: Shard,
    temperature: tuple[float, Tensor | None],
    mask: Tensor | None,
) -> TokenLogprobs:
    return TokenLogprobs(*_of_logits_and_ids(logits, token_ids, labels, *shard.arguments, *temperature, mask)[:4])


# ---- of the LM head -------------------------------------------------------------------------------------------------


@without_autocast
def _forward(problem: HeadProblem, token_ids: Tensor) -> tuple[Tensor, ...]:
    shape, room = problem.labels.shape, new_room_for_logits(problem)
    rows = PackedRows.of(problem, *(_flat(values, shape) for values in (problem.labels, token_ids)))
    if rows is None:
        return *(fake.fill_(torch.nan) for fake in _fake_results(problem.hidden, token_ids)), room
    (targets, ids), temperature = rows.values, rows.temperature
    taken = Taken.nothing(ids, rows.hidden)
    for r, first, logits in tiles_of_logits(problem, rows.hidden, kept_logits(problem, room)):
        _op.token_softmax_state_.default(
            taken.state[r], taken.logits[r], logits, targets[r], ids[r], first, *temperature.map_rows(itemgetter(r))
        )
    found = taken.finished(problem.shard, ids, targets, None, temperature)
    logprobs, *of_rows = rows.scatter(found, problem.rows)
    return logprobs.view(token_ids.shape), *(output.view(shape) for output in of_rows), room


@without_autocast
def _backward(
    problem: HeadProblem, token_ids: Tensor, grads: Grads, results: Results, room: Tensor, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    flat = partial(_flat, rows=problem.labels.shape)
    incoming, tokens = _at_tokens(
        Grads(*map(flat, grads)), flat(token_ids), flat(problem.labels), Results(*map(flat, results)),
        problem.flat_temperature, flat(problem.mask),
    )  # fmt: skip
    assert incoming.grad_logprob is not None
    assert incoming.grad_entropy is not None
    active = (incoming.grad_logprob != 0) | (incoming.grad_entropy != 0) | (tokens.values != 0).any(1)
    tail = problem._replace(labels=torch.full_like(problem.labels, _IN_NO_TILE, dtype=torch.int32))
    return of_active_rows(tail, incoming, active, wanted, tokens, kept=kept_logits(problem, room))


def _checked(*arguments: Any) -> tuple[HeadProblem, Tensor]:
    """Returns the problem and the given ids of an op's arguments. Checks them."""
    token_ids, *of_head = arguments
    problem = problem_of(**dict(zip(argument_names("linear_token_logprobs")[1:], of_head, strict=False)))
    problem.check()
    require_ids_of_rows(token_ids, "hidden", problem.hidden)
    if is_known(token_ids) and token_ids.numel():
        low, high = (int(bound) for bound in token_ids.aminmax())
        end = None if problem.shard.ranks is not None else len(problem.weight)
        if low < -1 or (end is not None and high >= end):
            raise ValueError(
                f"token_ids: got {low if low < -1 else high}; takes -1 (no id) or a token in [0, {end or 'V'})"
            )
    return problem, token_ids


def _forward_kernel(*arguments: Any) -> tuple[Tensor, ...]:
    problem, token_ids = _checked(*arguments)
    if not problem.hidden.is_cpu and problem.shard.ranks is None:  # on a CPU, the op itself checks the values
        look("linear_token_logprobs", named("linear_token_logprobs", arguments))
    try:
        return _forward(problem, token_ids)
    except RuntimeError:
        problem.require_memory()
        raise


def _run_backward(values: dict[str, Any], wanted: Wanted, into: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    token_ids, *names = argument_names("linear_token_logprobs")
    problem = problem_of(**{name: values[name] for name in names})
    grads = Grads(*(values[f"grad_{name}"] for name in Grads._fields))
    results = Results(*(values[name] for name in Results._fields))
    room = values["kept_logits"]
    return _backward(problem, values[token_ids], grads, results, room, wanted._replace(weight_grad_into=into))


def _backward_kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    grads, results, room, wanted = Grads(*arguments[:4]), Results(*arguments[4:10]), *arguments[10:12]
    problem, token_ids = _checked(*arguments[12:])
    return _backward(problem, token_ids, grads, results, room, Wanted(*wanted))


_ARGUMENTS = f"Tensor token_ids, {HEAD}, {HEAD_SHARD}"
declare(
    f"linear_token_logprobs({_ARGUMENTS}) -> ({_RESULTS}, Tensor kept_logits)",
    _forward_kernel,
    lambda *arguments: (*_fake_results(arguments[1], arguments[0]), fake_room("linear_token_logprobs", arguments)),
)
declare(
    f"linear_token_logprobs_backward({_GRADS}, {_RESULTS}, Tensor kept_logits, bool[3] wanted, {_ARGUMENTS}) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    _backward_kernel,
    lambda *arguments: fake_gradients(arguments[11], *arguments[13:15]),
)
_gradient = Gradient("linear_token_logprobs", "linear_token_logprobs_backward")
register_gradient("linear_token_logprobs", _gradient)
register_no_second_derivative("linear_token_logprobs_backward")
refuse_unreadable("linear_token_logprobs")

_head = HeadWithGradient("linear_token_logprobs", _gradient, _run_backward)


def linear_token_logprobs(
    problem: HeadProblem, token_ids: Tensor, at_backward: AtBackward | None = None
) -> TokenLogprobs:
    """``at_backward`` is as for ``linear_logprob_entropy``."""
    arguments = token_ids, *head_arguments(problem.keeping_for_gradient()), *problem.shard.head_arguments
    return TokenLogprobs(*_head(at_backward, arguments)[:4])


# ---- arguments of public functions ----------------------------------------------------------------------------------


def with_labels(labels: Tensor | None, token_ids: Tensor) -> Tensor:
    return token_ids.new_full(token_ids.shape[:-1], -100) if labels is None else labels


def require_ids_of_rows(token_ids: Tensor, name: str, values: Tensor) -> None:
    """Requires ids for each row of ``values``, which is the argument ``name``."""
    require_readable(**{name: values, "token_ids": token_ids})
    require_tensors(**{name: values, "token_ids": token_ids})
    if token_ids.dim() != values.dim() or token_ids.shape[:-1] != values.shape[:-1]:
        rows = [*values.shape[:-1], "K"]
        raise ValueError(f"token_ids: got shape {list(token_ids.shape)}; takes K ids for each row, {rows}")
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids: got dtype {token_ids.dtype}; takes int32 or int64")
