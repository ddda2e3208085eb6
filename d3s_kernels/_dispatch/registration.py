"""Registers with torch, for each op: the shapes of its results, its gradient, and the layouts that it refuses.

The functions for the shapes (fakes) are next to the kernels in ``_torch``. They do not check the arguments. The ops
that are written in Python are declared in ``over_supports`` and in ``_lm_head``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._arguments.checks import require_readable
from .._torch.kernels import row_statistics
from .backends import DEVICES, is_built
from .libraries import COMPILED, argument_names, builtin, by_name, default_arguments, named, schema_of

_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]


# ---- shapes of results -----------------------------------------------------------------------------------------------


def _register_fake(op: str) -> None:
    fake = _torch.FAKES.get(op)
    if fake is None:
        assert not schema_of(op).returns, f"{op} has results, whose shapes are unknown"
        fake = _nothing
    torch.library.register_fake(f"d3s_kernels::{op}")(by_name(op, partial(fake, **default_arguments(op))))


def _nothing(**_: Any) -> None:
    return None


def new_row_statistics(values: Tensor) -> tuple[Tensor, ...]:
    """Makes the uninitialised results of ``logprob_entropy`` for rows of values."""
    return row_statistics(values, values.shape[:-1])


# ---- ops that are written in Python ----------------------------------------------------------------------------------

_declared = torch.library.Library("d3s_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]


def declare(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Declares an op whose kernel is Python code that calls other ops, on every device."""
    name = schema.partition("(")[0]
    _declared.define(schema)  # type: ignore[no-untyped-call]
    for key in DEVICES.values():
        _declared.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"d3s_kernels::{name}", fake, lib=_declared)


below_autograd = torch._C._AutoDispatchBelowAutograd

# ---- gradients -------------------------------------------------------------------------------------------------------

NO_GRAD = {"logprob_entropy": "logprob_entropy_no_grad"}
"""Maps the name of an op to the op without the results that only the gradient needs. In eager mode, the function of the
op (``ops.py``) does not return these results; to allocate and to return one takes 1 us.
"""

EAGER: dict[str, Callable[..., Any]] = {}
"""Maps the name of an op to the function that eager mode calls: it runs the op and records the op's gradient. The
functions that torch makes for this purpose parse the schema in each call, which takes 100 us.
"""


class Gradient:
    """Computes the gradient of ``op`` with the op ``backward``. Each argument of ``backward`` is found by name: it is
    an argument or a result of ``op``, or it is ``grad_x``, the incoming gradient of the result ``x``. A result
    ``grad_x`` of ``backward`` is the gradient of the argument ``x``. If ``backward`` has an argument ``wanted``, it
    gets a flag for each of these gradients: whether the gradient is needed.

    A missing incoming gradient stays None. So an entropy that is used only as a score costs nothing in the backward.
    """

    def __init__(
        self, op: str, backward: str, keep: tuple[str, ...] = (), change: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """``change`` is a function that may change the arguments of ``backward``. ``keep`` names additional values to
        save for ``change``.
        """
        self.names, self._takes, self._change = argument_names(op), default_arguments(backward), change
        self._op, self._backward = (getattr(torch.ops.d3s_kernels, name).default for name in (op, backward))
        self._in_eager_mode = builtin(self._op)
        schema = schema_of(op)
        values = *schema.arguments, *schema.returns
        saved = [place for place, value in enumerate(values) if value.name in self._takes or value.name in keep]
        tensors = [place for place in saved if "Tensor" in str(values[place].type)]
        self._tensors = {values[place].name: place for place in tensors}
        self._numbers = {values[place].name: place for place in saved if place not in tensors}
        self._incoming = [f"grad_{result.name}" for result in schema.returns]
        self._constant = [place for place, name in enumerate(self._incoming) if name not in self._takes]
        self._returned = len(self._incoming) - len(self._constant) if op in NO_GRAD else None  # constant ones are last
        self._saved = _values_at(self._tensors.values()), _values_at(self._numbers.values())
        differentiable = [result.name.removeprefix("grad_") for result in schema_of(backward).returns]
        self.places = [self.names.index(name) for name in differentiable]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        results = output if isinstance(output, tuple) else (output,)
        if self._constant:
            ctx.mark_non_differentiable(*[results[place] for place in self._constant])
        self._keep(ctx, (*inputs, *results))

    def _keep(self, ctx: Any, values: tuple[Any, ...]) -> None:
        tensors, numbers = self._saved
        ctx.save_for_backward(*tensors(values))
        ctx.numbers = numbers(values)

    def saved(self, ctx: Any, saved_tensors: tuple[Tensor, ...], incoming: tuple[Tensor | None, ...]) -> dict[str, Any]:
        """Returns the saved values and the incoming gradients, by name."""
        values = self._takes | dict(zip(self._tensors, saved_tensors, strict=True))
        values |= dict(zip(self._numbers, ctx.numbers, strict=True))
        values |= dict(zip(self._incoming, incoming, strict=False))  # the constant results may not have been returned
        if self._change is not None:
            self._change(values)
        return values

    def forward(self, ctx: Any, *inputs: Any) -> Any:
        """Runs the op in eager mode. If eager mode has an op without the constant results (:data:`NO_GRAD`), these
        results are only saved for the backward, since torch takes time for each result of a function.
        """
        with below_autograd():
            output = self._in_eager_mode(*inputs)
        if self._returned is None:
            self.save(ctx, inputs, output)
            return output
        ctx.set_materialize_grads(False)
        self._keep(ctx, inputs + output)
        return output[: self._returned]

    def backward(self, ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(self.names)
        if all(grad is None for grad in incoming):
            return tuple(results)
        tensors = ctx.saved_tensors  # activation checkpointing recomputes these tensors here, with autograd
        if torch.is_grad_enabled():  # autograd must see the backward op, which refuses a second derivative
            gradients = self._run(ctx, tensors, incoming)
        else:
            with below_autograd():
                gradients = self._run(ctx, tensors, incoming)
        for place, gradient in zip(self.places, gradients, strict=True):
            if self._needed(ctx, place):
                results[place] = gradient
        return tuple(results)

    def _run(self, ctx: Any, tensors: tuple[Tensor, ...], incoming: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        values = self.saved(ctx, tensors, incoming)
        values["wanted"] = [self._needed(ctx, place) for place in self.places]
        gradients = self._backward(*[values[name] for name in self._takes])
        return gradients if isinstance(gradients, tuple) else (gradients,)

    def _needed(self, ctx: Any, place: int) -> bool:
        # Torch may leave out final arguments that have their default values.
        return place < len(ctx.needs_input_grad) and ctx.needs_input_grad[place]


def _values_at(places: Iterable[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Returns a function that takes the values at these places from a tuple. ``itemgetter`` takes half the time of a
    loop, but returns a tuple only for several places.
    """
    places = tuple(places)
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[place] for place in places)


def register_gradient(op: str, gradient: Gradient) -> None:
    """Registers the gradient of an op for graphs, and adds the op's function for eager mode to :data:`EAGER`."""
    torch.library.register_autograd(f"d3s_kernels::{op}", gradient.backward, setup_context=gradient.save)
    defaults = list(default_arguments(op).values())
    methods = {"forward": staticmethod(gradient.forward), "backward": staticmethod(gradient.backward)}
    function: Any = type(f"GeneratedBackwardFor_d3s_kernels_{op}_default", (torch.autograd.Function,), methods)
    # Function.apply of torch is not called: it also looks for transforms of functorch, which the functions in ops.py
    # have done, and unwraps all arguments that such a transform has left, in 2 us. Only those with a gradient need it.
    apply, unwrapped = super(torch.autograd.Function, function).apply, torch._C._functorch.unwrap_if_dead

    def run(*arguments: Any) -> Any:
        values = [*arguments, *defaults[len(arguments) :]]
        for place in gradient.places:
            if values[place] is not None:
                values[place] = unwrapped(values[place])
        return apply(*values)

    EAGER[op] = run


def register_no_second_derivative(op: str) -> None:
    """Makes autograd raise an error if it has to differentiate ``op``, which computes a gradient itself."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("d3s_kernels: its ops can be differentiated once, not twice")

    torch.library.register_autograd(f"d3s_kernels::{op}", refuse)


def register_no_gradient(op: str) -> None:
    """Says that no result of the op has a gradient. Without this, torch would attach a "not implemented" node to the
    results.
    """
    _library.impl(op, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]


# ---- layouts that no kernel reads: sparse, quantised, nested ---------------------------------------------------------

_LAYOUTS = ("Sparse", "SparseCsr", "Quantized", "NestedTensor")
_KEYS = ["MkldnnCPU", *(layout + key for layout in _LAYOUTS for device, key in DEVICES.items() if is_built(device))]


def refuse_unreadable(op: str) -> None:
    """Registers a kernel for sparse, quantised and nested tensors. The kernel raises an error that names the argument.
    Without this kernel, torch's dispatcher would only say that the op "could not run with arguments from the
    'SparseCPU' backend".
    """

    def refuse(*arguments: Any, **options: Any) -> Any:
        by_names = named(op, arguments) | options
        require_readable(**{name.removesuffix("_tensor"): value for name, value in by_names.items()})
        raise AssertionError(f"one of {', '.join(by_names)} has a layout that require_readable takes")

    for key in _KEYS:
        _library.impl(op, refuse, key)  # type: ignore[no-untyped-call]


# ---- the compiled ops ------------------------------------------------------------------------------------------------

for _name in ("logprob_entropy", "importance_ratio"):
    register_gradient(_name, Gradient(_name, f"{_name}_backward"))
for _name in COMPILED:
    _register_fake(_name)
    refuse_unreadable(_name)
    if _name.endswith("_backward"):
        register_no_second_derivative(_name)
    elif _name not in EAGER:
        register_no_gradient(_name)
