"""The LM head with options that are asked for when its backward runs.

``weight_grad_into``: autograd would hold the weight's gradient of each micro-batch, V x H numbers, and add it to that
of the micro-batches before. Here the products of the backward add to a tensor of the caller's, so that it is read and
written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import require_readable
from .._dispatch import ops
from .._dispatch.autograd import of_known_labels
from .._dispatch.libraries import argument_names
from .backward import Incoming, backward
from .gradients import Wanted
from .problem import HeadProblem


def require_room_for_gradient(into: Tensor, weight: Tensor, name: str = "weight") -> None:
    """Refuses a tensor to which the weight's gradient cannot be added."""
    require_readable(weight_grad_into=into)
    if torch.compiler.is_compiling():
        raise ValueError("weight_grad_into: got a tensor in torch.compile; takes one in eager mode alone")
    if into.shape != weight.shape or not into.is_contiguous():
        raise ValueError(
            f"weight_grad_into: got shape {list(into.shape)} and strides {list(into.stride())}; takes a contiguous "
            f"tensor of the shape of {name}, {list(weight.shape)}"
        )
    if into.dtype not in (torch.float32, weight.dtype):
        raise ValueError(
            f"weight_grad_into: got dtype {into.dtype}; takes float32 or the dtype of {name}, {weight.dtype}"
        )
    if into.requires_grad:
        raise ValueError("weight_grad_into: got a tensor that requires a gradient; takes one that does not")


class AtBackward(NamedTuple):
    """Each is called once in a backward."""

    weight_grad_into: Callable[[], Tensor | None]  # None: autograd gets the gradient
    max_grad_rows: Callable[[], int | None] = lambda: None  # None: the op's own


class HostNumber:
    """A 0-d integer tensor on its way to the host, which reads it later, when it waits for the device anyway.
    ``value`` waits only if the copy is not done by then.
    """

    def __init__(self, number: Tensor) -> None:
        self._copy, self._done = number, None
        if number.is_cuda:
            pinned = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._copy, self._done = pinned.copy_(number, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(number.device))

    def value(self) -> int:
        if self._done is not None:
            self._done.synchronize()
        return int(self._copy)


def gradient_to_add_to(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The tensor to which autograd would add the weight's gradient, if nobody sees the difference; else None."""
    if type(weight.grad) is not Tensor or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    usable = weight.grad.dtype in (torch.float32, dtype) and weight.grad.is_contiguous()
    return weight.grad if usable else None


def with_weight_grad_into(weight_grad_into: Tensor | None, op: str, *arguments: Any) -> tuple[Tensor, ...]:
    """The results of an op of the LM head, whose backward adds the weight's gradient to ``weight_grad_into``."""
    if weight_grad_into is None:
        plain: tuple[Tensor, ...] = getattr(ops, op)(*arguments)
        return plain
    return asking_at_backward(AtBackward(lambda: weight_grad_into), op, *arguments)


def asking_at_backward(options: AtBackward, op: str, *arguments: Any) -> tuple[Tensor, ...]:
    """The results of an op of the LM head, whose arguments all are given. Not in a graph, which cannot ask."""
    results: tuple[Tensor, ...] = _AsksAtBackward.apply(options, op, *arguments)  # type: ignore[no-untyped-call]
    return results


class _AsksAtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: AtBackward, op: str, *arguments: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = getattr(ops, op)(*arguments)
        given = dict(zip(argument_names(op), arguments, strict=True))
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[2:])
        ctx.save_for_backward(*tensors.values(), *results)
        ctx.options, ctx.names, ctx.tensors = options, argument_names(op), list(tensors)
        ctx.others = {name: value for name, value in given.items() if name not in tensors and name != "max_rows"}
        return results

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "d3s_kernels: the LM head can be differentiated once, not twice; got a backward with create_graph=True"
            )
        needed = dict(zip(ctx.names, ctx.needs_input_grad[2:], strict=True))
        found: dict[str, Tensor] = {}
        if grad_logprob is not None or grad_entropy is not None:
            *tensors, logprob, entropy, row_max, log_sum = ctx.saved_tensors
            given = ctx.others | dict(zip(ctx.tensors, tensors, strict=True))
            bound = given.pop("max_grad_rows")
            problem, asked_bound, into = HeadProblem.of(**given), ctx.options.max_grad_rows(), None
            wanted = Wanted(needed["hidden"], needed["weight"], needed["bias"])
            if wanted.weight:
                into = ctx.options.weight_grad_into()
            if problem.shard.ranks is not None:
                grad_logprob = of_known_labels(grad_logprob, logprob)
            incoming = Incoming(grad_logprob, grad_entropy, entropy, row_max, log_sum)
            gradients = backward(problem, incoming, wanted, bound if asked_bound is None else asked_bound, into)
            found = dict(zip(("hidden", "weight", "bias"), gradients, strict=True))
            needed["weight"] &= into is None
        return None, None, *(found.get(name) if needed[name] else None for name in ctx.names)
