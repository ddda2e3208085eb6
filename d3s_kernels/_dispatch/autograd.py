"""Registers the gradient of each op, or that it has none.

An op and the op that computes its gradient are bound by the names in their schemas. The backward takes arguments of the
forward, results of it (``entropy``) and incoming gradients (``grad_entropy``). It returns gradients (``grad_hidden``);
``wanted`` says which of them are needed. Incoming gradients that are missing stay None, so that an entropy used as a
score costs nothing in the backward.

Where ranks share the vocabulary, two more arguments give the rank's first token and the group. Incoming gradients are
the same on all ranks, so each rank computes the gradient of its logits without communication. (The LM head sums the
gradient of the hidden states over the ranks: ``_head/backward.py``.)
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .libraries import argument_names, registered, schema_of

_op = torch.ops.d3s_kernels


def of_known_labels(grad_logprob: Tensor | None, logprob: Tensor | None) -> Tensor | None:
    """Makes the gradient NaN for a label that no rank has. One rank cannot see this, but the logprob is NaN."""
    if grad_logprob is None or logprob is None:
        return grad_logprob
    return torch.where(logprob.isnan() & (grad_logprob != 0), torch.nan, grad_logprob)


def _bound(op: str, backward: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The backward and the setup of the op's gradient, which the op ``backward`` computes; and the op with both, for
    eager mode: torch's own way around them parses the schema in each call, which takes 100 us.

    What the two share is found here, once. A call only picks values by their places.
    """
    names, results = argument_names(op), [result.name for result in schema_of(op).returns]
    takes, optional = argument_names(backward), [a for a in schema_of(backward).arguments if a.has_default_value()]
    gradient_of = [names.index(result.name.removeprefix("grad_")) for result in schema_of(backward).returns]
    constants = [place for place, name in enumerate(results) if f"grad_{name}" not in takes]

    forward = [*schema_of(op).arguments, *schema_of(op).returns]
    tensors = [value.name for value in forward if value.name in takes and "Tensor" in str(value.type)]
    others = [value.name for value in forward if value.name in takes and "Tensor" not in str(value.type)]
    shared = "group_name" in names  # the vocabulary, by ranks
    if shared:
        tensors.append("logprob")
    pick = itemgetter(*map([*names, *results].index, (*tensors, *others)))
    known = [*(f"grad_{name}" for name in results), *tensors, *others, "wanted", *(a.name for a in optional)]
    order = itemgetter(*map(known.index, takes))  # an error here: the backward takes what nobody gives it
    defaults = [a.default_value for a in optional]
    compute = getattr(_op, backward).default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[outputs[place] for place in constants])
        needed = pick((*inputs, *outputs))
        ctx.others = needed[len(tensors) :]
        ctx.save_for_backward(*needed[: len(tensors)])

    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(names)
        if all(grad is None for grad in grads):
            return tuple(results)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        if shared:
            grads = of_known_labels(grads[0], saved[-1]), *grads[1:]
        # needs_input_grad leaves out arguments at the end that have their default value.
        wanted = [place < len(needs) and needs[place] for place in gradient_of]
        given = order((*grads, *saved, *ctx.others, wanted, *defaults))
        if torch.is_grad_enabled():  # refuses a second derivative
            found = compute(*given)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                found = compute(*given)
        gradients = (found,) if isinstance(found, Tensor) else found
        for place, grad, want in zip(gradient_of, gradients, wanted, strict=True):
            results[place] = grad if want else None
        return tuple(results)

    forward_op, all_defaults = getattr(_op, op).default, [a.default_value for a in schema_of(op).arguments]

    def apply_forward(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = forward_op(*inputs)
        setup(ctx, inputs, output)
        return output

    of_torch = f"GeneratedBackwardFor_d3s_kernels_{op}_default"
    function: Any = type(of_torch, (torch.autograd.Function,), {"forward": apply_forward, "backward": run})

    def differentiable(*arguments: Any) -> Any:
        return function.apply(*arguments, *all_defaults[len(arguments) :])

    return run, setup, differentiable


def _no_second_derivative(*_: Any) -> None:
    raise RuntimeError("d3s_kernels: its ops can be differentiated once, not twice")


# The ops that have a gradient, and the op that computes it.
GRADIENTS = {
    "logprob_entropy": "logprob_entropy_backward",
    "vocab_parallel_logprob_entropy": "logprob_entropy_backward",
    "linear_logprob_entropy": "linear_logprob_entropy_backward",
    "vocab_parallel_linear_logprob_entropy": "vocab_parallel_linear_logprob_entropy_backward",
    "importance_ratio": "importance_ratio_backward",
}
EAGER: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _name in registered():
    if _name in GRADIENTS:
        _backward, _setup, EAGER[_name] = _bound(_name, GRADIENTS[_name])
        torch.library.register_autograd(f"d3s_kernels::{_name}", _backward, setup_context=_setup)
    elif _name.endswith("_backward"):
        torch.library.register_autograd(f"d3s_kernels::{_name}", _no_second_derivative)
    else:  # no gradient; without this, torch would attach a "not implemented" node to float outputs
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
