"""Registers what torch has to know of each op: the shapes of its results, and its gradient, or that it has none.

The shapes stand beside the kernels of ``_torch``. Only real kernels check the arguments.

A gradient is two functions: one saves what the backward needs, and the other returns the gradients by the names of the
arguments. Incoming gradients that are missing stay None, so that an entropy used as a score costs nothing in the
backward. ``_head/op.py`` registers the gradients of the LM head in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .libraries import COMPILED, argument_names, by_name, schema_of

# ---- shapes of results -----------------------------------------------------------------------------------------------


def _register_fake(op: str) -> None:
    fake = _torch.FAKES.get(op)
    defaults = {argument.name: argument.default_value for argument in schema_of(op).arguments}
    if fake is None:
        assert not schema_of(op).returns, f"{op} has results, whose shapes are unknown"
        fake = _nothing
    torch.library.register_fake(f"d3s_kernels::{op}")(by_name(op, partial(fake, **defaults)))


def _nothing(**_: Any) -> None:
    return None


# ---- gradients -------------------------------------------------------------------------------------------------------

_op = torch.ops.d3s_kernels
Save = Callable[[Any, tuple[Any, ...], Any], None]
Gradients = Callable[..., dict[str, Tensor]]

EAGER: dict[str, Callable[..., Any]] = {}
"""The ops with their gradients, for eager mode. Torch's own way parses the schema in each call, which takes 100 us."""


def register_gradient(op: str, save: Save, gradients: Gradients) -> None:
    """Registers the gradient of an op for graphs, and puts the op for eager mode into :data:`EAGER`.

    Args:
        op: the name of the op.
        save: called as ``save(ctx, arguments of the op, its results)``.
        gradients: called as ``gradients(ctx, saved tensors, *incoming)``; returns gradients by the names of the
            arguments.
    """
    names, defaults = argument_names(op), [argument.default_value for argument in schema_of(op).arguments]
    call = getattr(_op, op).default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in incoming):
            return (None,) * len(names)
        saved = ctx.saved_tensors  # a checkpoint recomputes them here, with autograd
        if torch.is_grad_enabled():  # the op of the gradient refuses a second derivative
            found = gradients(ctx, saved, *incoming)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                found = gradients(ctx, saved, *incoming)
        results: list[Tensor | None] = [None] * len(names)
        for name, gradient in found.items():
            if needs(ctx, place := names.index(name)):
                results[place] = gradient
        return tuple(results)

    def forward(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = call(*inputs)
        setup(ctx, inputs, output)
        return output

    torch.library.register_autograd(f"d3s_kernels::{op}", backward, setup_context=setup)
    of_torch = f"GeneratedBackwardFor_d3s_kernels_{op}_default"
    function: Any = type(of_torch, (torch.autograd.Function,), {"forward": forward, "backward": backward})
    EAGER[op] = lambda *arguments: function.apply(*arguments, *defaults[len(arguments) :])


def needs(ctx: Any, place: int) -> bool:
    """Whether the argument at this place needs its gradient. Torch may leave out the last arguments, which have
    defaults.
    """
    return place < len(ctx.needs_input_grad) and ctx.needs_input_grad[place]


def register_no_second_derivative(op: str) -> None:
    """Makes the op of a gradient refuse to be differentiated."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("d3s_kernels: its ops can be differentiated once, not twice")

    torch.library.register_autograd(f"d3s_kernels::{op}", refuse)


# ---- logprob_entropy ------------------------------------------------------------------------------------------------


def _save_logprob_entropy(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    logits, labels, temperature, temperatures, mask, ids, offsets, *options, _ = arguments
    ctx.mark_non_differentiable(*results[2:])
    ctx.save_for_backward(logits, labels, temperatures, mask, ids, offsets, *results[1:])
    ctx.options = temperature, options


def _of_logprob_entropy(
    ctx: Any, saved: tuple[Tensor, ...], grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> dict[str, Tensor]:
    logits, labels, temperatures, mask, ids, offsets, *statistics = saved
    temperature, options = ctx.options
    gradient = _op.logprob_entropy_backward.default(
        grad_logprob, grad_entropy, logits, labels, *statistics, temperature, temperatures, mask, None, ids, offsets,
        *options,
    )  # fmt: skip
    return {"logits": gradient}


# ---- importance_ratio -----------------------------------------------------------------------------------------------


def _save_ratio(ctx: Any, arguments: tuple[Any, ...], ratio: Tensor) -> None:
    _, _, mask, groups, _, _, _, low, high = arguments
    ctx.save_for_backward(ratio, mask, groups)
    ctx.bounds = low, high


def _of_ratio(ctx: Any, saved: tuple[Tensor, ...], grad_ratio: Tensor) -> dict[str, Tensor]:
    return {"logprob": _op.importance_ratio_backward.default(grad_ratio, *saved, *ctx.bounds)}


register_gradient("logprob_entropy", _save_logprob_entropy, _of_logprob_entropy)
register_gradient("importance_ratio", _save_ratio, _of_ratio)
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _name in COMPILED:
    _register_fake(_name)
    if _name.endswith("_backward"):
        register_no_second_derivative(_name)
    elif _name not in EAGER:  # no gradient; without this, torch would attach a "not implemented" node to float outputs
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
