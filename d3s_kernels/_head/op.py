"""The ops that Python code computes: the LM head, and the ops for vocabulary shards.

Declares their schemas, fake kernels and gradients. The code is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import ops
from .._dispatch.backends import DEVICES
from .._dispatch.faults import look
from .._dispatch.libraries import argument_names
from .._dispatch.registration import needs, register_gradient, register_no_second_derivative
from .._dispatch.unreadable import refuse_unreadable
from .._together import NO_SAMPLING_MASK, ONE, NumberOrTensor, SamplingArguments, of_schema
from .backward import Incoming, Wanted, backward
from .forward import finished, forward, no_logits
from .problem import HeadProblem, Shard, problem_of

_op = torch.ops.d3s_kernels
_library = torch.library.Library("d3s_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]


def _declare(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for key in DEVICES.values():
        _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"d3s_kernels::{name}", fake, lib=_library)


def _results(like: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised results for each row: log-probability, entropy, largest logit and logarithm of the sum."""
    return tuple(like.new_empty(like.shape[:-1], dtype=torch.float32) for _ in range(4))


def _with_known_labels(grad_logprob: Tensor | None, logprob: Tensor) -> Tensor | None:
    """Makes the gradient NaN for a label that no rank has. One rank alone cannot know this, but then logprob is NaN."""
    if grad_logprob is None:
        return None
    return torch.where(logprob.isnan() & (grad_logprob != 0), torch.nan, grad_logprob)


# ---- linear_logprob_entropy -----------------------------------------------------------------------------------------

# The fields of HeadProblem and of its Shard.
_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, float? logit_softcap=None, Tensor? mask=None, SymInt? max_rows=None, "
    "SymInt? max_grad_rows=None, ScalarType logits_dtype=float, SymInt? workspace_bytes=None, "
    "Tensor? sampling_ids=None, Tensor? sampling_offsets=None, bool include_label=False, "
    "SymInt? max_dense_rows=None, SymInt first_token=0, str? group_name=None"
)


def _forward_kernel(*arguments: Any) -> tuple[Tensor, ...]:
    problem = problem_of(*arguments)
    if not problem.hidden.is_cpu and problem.shard.ranks is None:  # on a CPU the values are checked
        look("linear_logprob_entropy", dict(zip(argument_names("linear_logprob_entropy"), arguments, strict=False)))
    return forward(problem)


def _backward_kernel(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    wanted: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = problem_of(*arguments)
    problem.check()
    return backward(problem, Incoming(grad_logprob, grad_entropy, entropy, row_max, log_sum), Wanted(*wanted))


def _fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    (hidden, weight), wanted = arguments[6:8], arguments[5]
    shapes = hidden.shape, weight.shape, weight.shape[:1]
    return tuple(
        like.new_empty(shape if want else (0,))
        for like, shape, want in zip((hidden, weight, weight), shapes, wanted, strict=True)
    )


_declare(
    f"linear_logprob_entropy({_ARGUMENTS}) -> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    _forward_kernel,
    lambda hidden, *_: _results(hidden),
)
_declare(
    "linear_logprob_entropy_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor entropy, Tensor row_max, "
    f"Tensor log_sum, bool[3] wanted, {_ARGUMENTS}) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    _backward_kernel,
    _fake_gradients,
)


def _save(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*results[2:])
    logprob = None if arguments[-1] is None else results[0]
    tensors = [value if isinstance(value, Tensor) else None for value in arguments]
    ctx.save_for_backward(*tensors, logprob, *results[1:])
    ctx.numbers = [None if isinstance(value, Tensor) else value for value in arguments]


def _restored(
    ctx: Any, saved: tuple[Tensor, ...], grad_logprob: Tensor | None
) -> tuple[list[Any], Tensor | None, list[Tensor]]:
    """The arguments of the forward, the incoming gradient of the log-probabilities, and [entropy, row_max, log_sum]."""
    *tensors, logprob, entropy, row_max, log_sum = saved
    arguments = [number if tensor is None else tensor for tensor, number in zip(tensors, ctx.numbers, strict=True)]
    if logprob is not None:  # a group shares the vocabulary
        grad_logprob = _with_known_labels(grad_logprob, logprob)
    return arguments, grad_logprob, [entropy, row_max, log_sum]


def _gradients(
    ctx: Any, saved: tuple[Tensor, ...], grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> dict[str, Tensor]:
    arguments, grad_logprob, statistics = _restored(ctx, saved, grad_logprob)
    names = argument_names("linear_logprob_entropy")
    wanted = [needs(ctx, names.index(name)) for name in Wanted._fields]
    gradients = _op.linear_logprob_entropy_backward.default(grad_logprob, grad_entropy, *statistics, wanted, *arguments)
    return dict(zip(Wanted._fields, gradients, strict=True))


refuse_unreadable("linear_logprob_entropy")
register_gradient("linear_logprob_entropy", _save, _gradients)
register_no_second_derivative("linear_logprob_entropy_backward")


class AtBackward(NamedTuple):
    """Functions that give arguments at the time when the backward runs. Each is called at most once in a backward."""

    weight_grad_into: Callable[[], Tensor | None]  # if it returns None, autograd gets the gradient
    max_grad_rows: Callable[[], int | None] = lambda: None  # if it returns None, the op's max_grad_rows holds


def adding_to(weight_grad_into: Tensor | None) -> AtBackward | None:
    return None if weight_grad_into is None else AtBackward(lambda: weight_grad_into)


def linear_logprob_entropy(problem: HeadProblem, at_backward: AtBackward | None = None) -> tuple[Tensor, Tensor]:
    """The log-probabilities and entropies of the rows.

    Autograd would store the weight's gradient of each micro-batch, V x H numbers, and then add it to the gradient of
    earlier micro-batches. With ``at_backward`` the matrix products of the backward add to the caller's tensor, which is
    read and written once. This works only in eager mode, since a graph cannot call ``at_backward``.
    """
    if at_backward is None:
        logprob, entropy, _, _ = ops.linear_logprob_entropy(*problem.arguments())
    else:
        logprob, entropy, _, _ = _AsksAtBackward.apply(at_backward, *problem.arguments())  # type: ignore[no-untyped-call]
    return logprob, entropy


class _AsksAtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at_backward: AtBackward, *arguments: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = ops.linear_logprob_entropy(*arguments)
        ctx.set_materialize_grads(False)
        _save(ctx, arguments, results)
        ctx.at_backward = at_backward
        return results

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "d3s_kernels: the LM head can be differentiated once, not twice; got a backward with create_graph=True"
            )
        names = "at_backward", *argument_names("linear_logprob_entropy")
        needed = dict(zip(names, ctx.needs_input_grad, strict=True))
        found: dict[str, Tensor] = {}
        if grad_logprob is not None or grad_entropy is not None:
            arguments, grad_logprob, statistics = _restored(ctx, ctx.saved_tensors, grad_logprob)
            problem, max_grad_rows = problem_of(*arguments), ctx.at_backward.max_grad_rows()
            if max_grad_rows is not None:
                problem = problem._replace(max_grad_rows=max_grad_rows)
            wanted = Wanted(*(needed[name] for name in Wanted._fields))
            into = ctx.at_backward.weight_grad_into() if wanted.weight else None
            gradients = backward(problem, Incoming(grad_logprob, grad_entropy, *statistics), wanted, into)
            found = dict(zip(Wanted._fields, gradients, strict=True))
            needed["weight"] &= into is None
        return tuple(found.get(name) if need else None for name, need in needed.items())


# ---- vocab_parallel_logprob_entropy ---------------------------------------------------------------------------------


def _vocab_parallel_kernel(
    logits: Tensor,
    labels: Tensor,
    first_token: int,
    group_name: str,
    temperature: NumberOrTensor = ONE,
    mask: Tensor | None = None,
    sampling_mask: SamplingArguments = NO_SAMPLING_MASK,
) -> tuple[Tensor, ...]:
    shape = logits.shape[:-1]
    state = no_logits(shape.numel(), logits)
    _op.softmax_state_.default(state, logits, labels, first_token, *temperature, mask, *sampling_mask)
    temperature = temperature.map_rows(lambda each: each.reshape(-1))
    rows_of_mask = None if mask is None else mask.reshape(-1)
    shard = Shard.of(first_token, group_name)
    outputs = finished(shard, state, labels.reshape(-1), rows_of_mask, temperature)
    return tuple(output.view(shape) for output in outputs)


_declare(
    "vocab_parallel_logprob_entropy(Tensor logits, Tensor labels, SymInt first_token, str group_name, "
    "float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None, Tensor? sampling_ids=None, "
    "Tensor? sampling_offsets=None, bool include_label=False, SymInt? max_dense_rows=None) "
    "-> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    of_schema(_vocab_parallel_kernel),
    lambda logits, *_: _results(logits),
)


def _save_vocab_parallel(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    logits, labels, first_token, _, temperature, temperatures, mask, ids, offsets, *options = arguments
    ctx.mark_non_differentiable(*results[2:])
    ctx.save_for_backward(logits, labels, temperatures, mask, ids, offsets, *results)
    ctx.options = first_token, temperature, options


def _of_vocab_parallel(
    ctx: Any, saved: tuple[Tensor, ...], grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> dict[str, Tensor]:
    """Incoming gradients are the same on all ranks, so each rank computes its gradient without communication."""
    logits, labels, temperatures, mask, ids, offsets, logprob, *statistics = saved
    first_token, temperature, options = ctx.options
    gradient = _op.logprob_entropy_backward.default(
        _with_known_labels(grad_logprob, logprob), grad_entropy, logits, labels, *statistics, temperature,
        temperatures, mask, first_token, ids, offsets, *options,
    )  # fmt: skip
    return {"logits": gradient}


register_gradient("vocab_parallel_logprob_entropy", _save_vocab_parallel, _of_vocab_parallel)
