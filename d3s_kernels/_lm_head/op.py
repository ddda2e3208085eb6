"""Declares the ops that are written in Python: the LM head, and the ops for vocabulary shards. Their code is the same
on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NO_SUPPORTS, ONE, NumberOrTensor, OptionalSupports, Tile, of_schema
from .._dispatch import ops
from .._dispatch.faults import look
from .._dispatch.libraries import argument_names, named
from .._dispatch.over_supports import STATISTICS, SUPPORTS, TEMPERATURE_AND_MASK, fake_statistics, merge_tile_
from .._dispatch.registration import (
    Gradient,
    declare,
    new_row_statistics,
    refuse_unreadable,
    register_gradient,
    register_no_second_derivative,
)
from .backward import INPUTS, Incoming, Wanted, backward
from .forward import finished, forward, no_logits
from .problem import HeadProblem, Shard
from .tiles import kept_logits, new_room_for_logits

_op = torch.ops.d3s_kernels


def _with_known_labels(values: dict[str, Any]) -> None:
    """Makes the gradient NaN for a label in no rank's shard. A rank recognises such a label by the NaN logprob."""
    grad, logprob = values["grad_logprob"], values["logprob"]
    if grad is not None and values["group_name"] is not None:
        values["grad_logprob"] = torch.where(logprob.isnan() & (grad != 0), torch.nan, grad)


# ---- linear_logprob_entropy -----------------------------------------------------------------------------------------

# The arguments of the schemas: the fields of HeadProblem.
HEAD = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, float? logit_softcap=None, Tensor? mask=None, SymInt? max_rows=None, "
    "SymInt? max_grad_rows=None, ScalarType logits_dtype=float, SymInt? workspace_bytes=None, "
    "SymInt? keep_logits_bytes=None"
)
SHARD = "SymInt first_token=0, str? group_name=None"
HEAD_SHARD = f"{SHARD}, bool sum_hidden_grad=True"
_ARGUMENTS = (
    f"{HEAD}, Tensor? support_ids=None, Tensor? support_offsets=None, bool include_label=False, "
    f"SymInt? max_dense_rows=None, {HEAD_SHARD}"
)


def problem_of(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    workspace_bytes: int | None = None,
    keep_logits_bytes: int | None = None,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    include_label: bool = False,
    max_dense_rows: int | None = None,
    first_token: int = 0,
    group_name: str | None = None,
    sum_hidden_grad: bool = True,
) -> HeadProblem:
    """Makes a HeadProblem from the arguments of the op's schema."""
    return HeadProblem(
        hidden, weight, labels, bias, NumberOrTensor(temperature, temperature_tensor), logit_softcap, mask, max_rows,
        max_grad_rows, logits_dtype, workspace_bytes, keep_logits_bytes,
        OptionalSupports(support_ids, support_offsets, include_label, max_dense_rows),
        Shard.of(first_token, group_name, sum_hidden_grad),
    )  # fmt: skip


def head_arguments(problem: HeadProblem) -> tuple[Any, ...]:
    """Returns the arguments of ``HEAD``, in the schema's order."""
    return (
        problem.hidden, problem.weight, problem.labels, problem.bias, *problem.temperature, problem.logit_softcap,
        problem.mask, problem.max_rows, problem.max_grad_rows, problem.logits_dtype, problem.workspace_bytes,
        problem.keep_logits_bytes,
    )  # fmt: skip


def arguments_of(problem: HeadProblem) -> tuple[Any, ...]:
    """Returns the arguments of the op's schema, in the schema's order. :func:`problem_of` is the inverse."""
    return *head_arguments(problem), *problem.supports, *problem.shard.head_arguments


def _forward_kernel(*arguments: Any) -> tuple[Tensor, ...]:
    problem = problem_of(*arguments)
    if not problem.hidden.is_cpu and problem.shard.ranks is None:  # on a CPU, the op itself checks the values
        look("linear_logprob_entropy", named("linear_logprob_entropy", arguments))
    return forward(problem)


def _backward_kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    incoming, wanted, problem = Incoming(*arguments[:5]), Wanted(*arguments[6]), problem_of(*arguments[7:])
    problem.check()
    return backward(problem, incoming, wanted, kept=kept_logits(problem, arguments[5]))


def fake_gradients(wanted: list[bool], hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    results = (hidden, hidden.shape), (weight, weight.shape), (weight, weight.shape[:1])
    return tuple(like.new_empty(shape if want else 0) for (like, shape), want in zip(results, wanted, strict=True))


def fake_room(op: str, arguments: tuple[Any, ...]) -> Tensor:
    """The memory for kept logits in a trace of ``op``, in which the process group of a shard may not exist."""
    names = argument_names(op)
    given = dict(zip(names[: names.index("first_token")], arguments, strict=False))
    given.pop("token_ids", None)
    return new_room_for_logits(problem_of(**given))


declare(
    f"linear_logprob_entropy({_ARGUMENTS}) -> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum, "
    "Tensor kept_logits)",
    _forward_kernel,
    lambda *arguments: (*new_row_statistics(arguments[0]), fake_room("linear_logprob_entropy", arguments)),
)
declare(
    "linear_logprob_entropy_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor entropy, Tensor row_max, "
    f"Tensor log_sum, Tensor kept_logits, bool[3] wanted, {_ARGUMENTS}) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    _backward_kernel,
    lambda *arguments: fake_gradients(*arguments[6:9]),
)


_gradient = Gradient(
    "linear_logprob_entropy", "linear_logprob_entropy_backward", keep=("logprob",), change=_with_known_labels
)
register_gradient("linear_logprob_entropy", _gradient)
register_no_second_derivative("linear_logprob_entropy_backward")
refuse_unreadable("linear_logprob_entropy")


class AtBackward(NamedTuple):
    """Functions that return arguments of the backward. Each backward calls each function at most once."""

    weight_grad_into: Callable[[], Tensor | None]  # if it returns None, autograd gets the weight's gradient
    max_grad_rows: Callable[[], int | None] = lambda: None  # if it returns None, the op's max_grad_rows is used


def adding_to(weight_grad_into: Tensor | None) -> AtBackward | None:
    return None if weight_grad_into is None else AtBackward(lambda: weight_grad_into)


def linear_logprob_entropy(problem: HeadProblem, at_backward: AtBackward | None = None) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities and the entropies of the rows.

    Without ``at_backward``, each micro-batch allocates a gradient of V x H elements for the weight, and autograd adds
    it to the gradient of earlier micro-batches. With ``at_backward``, the backward's matrix products add directly to
    the caller's tensor, which is read and written once. This works only in eager mode, since a graph cannot call the
    functions in ``at_backward``.
    """
    logprob, entropy, *_ = _head(at_backward, arguments_of(problem.keeping_for_gradient()))
    return logprob, entropy


class HeadWithGradient:
    """An op of the LM head whose backward may call the functions of an :class:`AtBackward`. ``run_backward`` is called
    with the values of the gradient by name, the wanted gradients, and the tensor to which the weight's gradient is
    added, or None.
    """

    def __init__(
        self,
        op: str,
        gradient: Gradient,
        run_backward: Callable[[dict[str, Any], Wanted, Tensor | None], tuple[Tensor, Tensor, Tensor]],
    ) -> None:
        self._op, self._names = ops.function_of(op), argument_names(op)
        self._gradient, self._run = gradient, run_backward

    def __call__(self, at_backward: AtBackward | None, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if at_backward is None:
            results: tuple[Tensor, ...] = self._op(*arguments)
            return results
        asked: tuple[Tensor, ...] = _AsksAtBackward.apply(self, at_backward, *arguments)  # type: ignore[no-untyped-call]
        return asked

    def forward(self, ctx: Any, at_backward: AtBackward, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self._op(*arguments)
        self._gradient.save(ctx, arguments, results)
        ctx.at_backward = at_backward
        return results

    def backward(self, ctx: Any, incoming: tuple[Tensor | None, ...]) -> Iterator[Tensor | None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "d3s_kernels: the LM head can be differentiated once, not twice; got a backward with create_graph=True"
            )
        needed = dict(zip(self._names, ctx.needs_input_grad[2:], strict=True))
        gradients: dict[str, Tensor] = {}
        if any(grad is not None for grad in incoming):
            values = self._gradient.saved(ctx, ctx.saved_tensors, incoming)
            into = ctx.at_backward.weight_grad_into() if needed["weight"] else None
            max_grad_rows = ctx.at_backward.max_grad_rows()
            if max_grad_rows is not None:
                values["max_grad_rows"] = max_grad_rows
            results = self._run(values, Wanted(*(needed[name] for name in INPUTS)), into)
            gradients = dict(zip(INPUTS, results, strict=True))
            needed["weight"] &= into is None
        return (gradients.get(name) if need else None for name, need in needed.items())


class _AsksAtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, head: HeadWithGradient, at_backward: AtBackward, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.head = head
        return head.forward(ctx, at_backward, arguments)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.head.backward(ctx, incoming)


def _run_backward(values: dict[str, Any], wanted: Wanted, into: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    problem = problem_of(**{name: values[name] for name in argument_names("linear_logprob_entropy")})
    incoming = Incoming(*(values[name] for name in Incoming._fields))
    return backward(problem, incoming, wanted, into, kept_logits(problem, values["kept_logits"]))


_head = HeadWithGradient("linear_logprob_entropy", _gradient, _run_backward)


# ---- vocab_parallel_logprob_entropy ---------------------------------------------------------------------------------


def _vocab_parallel_kernel(
    logits: Tensor,
    labels: Tensor,
    first_token: int,
    group_name: str,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    state = no_logits(labels.numel(), logits)
    _op.softmax_state_.default(state, logits, labels, first_token, *temperature, mask)
    return _of_states(state, labels, Shard.of(first_token, group_name), temperature, mask)


def _vocab_parallel_support_kernel(
    logits: Tensor,
    labels: Tensor,
    first_token: int,
    group_name: str,
    supports: OptionalSupports = NO_SUPPORTS,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    state = no_logits(labels.numel(), logits)
    dense = merge_tile_(state, logits, labels, Tile(first_token), temperature, mask, supports)
    return *_of_states(state, labels, Shard.of(first_token, group_name), temperature, mask), dense


def _of_states(
    state: Tensor, labels: Tensor, shard: Shard, temperature: NumberOrTensor, mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Computes the results of rows from the states of all shards."""
    temperature = temperature.map_rows(lambda each: each.reshape(-1))
    outputs = finished(shard, state, labels.reshape(-1), None if mask is None else mask.reshape(-1), temperature)
    return tuple(output.view(labels.shape) for output in outputs)


_OF_SHARD = "Tensor logits, Tensor labels, SymInt first_token, str group_name, "
declare(
    f"vocab_parallel_logprob_entropy({_OF_SHARD}{TEMPERATURE_AND_MASK}) "
    "-> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    of_schema(_vocab_parallel_kernel),
    lambda logits, *_: new_row_statistics(logits),
)
declare(
    f"vocab_parallel_support_logprob_entropy({_OF_SHARD}{SUPPORTS}{TEMPERATURE_AND_MASK}) -> {STATISTICS}",
    of_schema(_vocab_parallel_support_kernel),
    fake_statistics,
)


# Incoming gradients are the same on all ranks, so each rank computes its gradient without communication.
for _name, _backward in (
    ("vocab_parallel_logprob_entropy", "logprob_entropy_backward"),
    ("vocab_parallel_support_logprob_entropy", "support_logprob_entropy_backward"),
):
    register_gradient(_name, Gradient(_name, _backward, keep=("logprob", "group_name"), change=_with_known_labels))

vocab_parallel_logprob_entropy = ops.function_of("vocab_parallel_logprob_entropy")
vocab_parallel_support_logprob_entropy = ops.function_of("vocab_parallel_support_logprob_entropy")
