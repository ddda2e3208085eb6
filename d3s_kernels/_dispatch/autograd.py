"""Registers the gradient of each op, or that it has none.

Incoming gradients that are missing stay None, so that an entropy used as a score costs nothing in the backward.

Where ranks share the vocabulary, two more arguments give the rank's first token and the group. Incoming gradients are
the same on all ranks, so each rank computes the gradient of its logits without communication. (The LM head sums the
gradient of the hidden states over the ranks: ``_head/backward.py``.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .libraries import registered

_op = torch.ops.d3s_kernels


def of_known_labels(grad_logprob: Tensor | None, logprob: Tensor | None) -> Tensor | None:
    """Makes the gradient NaN for a label that no rank has. One rank cannot see this, but the logprob is NaN."""
    if grad_logprob is None or logprob is None:
        return grad_logprob
    return torch.where(logprob.isnan() & (grad_logprob != 0), torch.nan, grad_logprob)


def _save(ctx: Any, output: tuple[Tensor, ...], *inputs: Tensor | None) -> None:
    logprob, entropy, row_max, log_sum = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.save_for_backward(*inputs, logprob if ctx.shard else None, entropy, row_max, log_sum)


def _save_logprob_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, *ctx.shard, ctx.temperature, temperature_tensor, mask = inputs[:-4]
    ids, offsets, ctx.include_label, ctx.max_dense_rows = inputs[-4:]
    _save(ctx, output, logits, labels, temperature_tensor, mask, ids, offsets)


def _logprob_entropy_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    logits, labels, temperature_tensor, mask, ids, offsets, logprob, entropy, row_max, log_sum = ctx.saved_tensors
    grad = None
    if grad_logprob is not None or grad_entropy is not None:
        grad = _op.logprob_entropy_backward.default(
            of_known_labels(grad_logprob, logprob), grad_entropy, logits, labels, entropy, row_max, log_sum,
            ctx.temperature, temperature_tensor, mask, ctx.shard[0] if ctx.shard else None,
            ids, offsets, ctx.include_label, ctx.max_dense_rows,
        )  # fmt: skip
    return grad, *[None] * (8 + len(ctx.shard))


def _save_without_kept_of(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Logits of kept tokens alone are an inner step of the LM head: no gradient is asked for.
    _save_logprob_entropy(ctx, inputs[:-1], output)


def _backward_without_kept_of(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    return *_logprob_entropy_backward(ctx, grad_logprob, grad_entropy), None


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, *ctx.shard, bias, ctx.temperature, temperature_tensor = inputs[:-10]
    ctx.logit_softcap, mask, _, ctx.max_grad_rows, ctx.logits_dtype, ctx.workspace_bytes = inputs[-10:-4]
    ids, offsets, ctx.include_label, ctx.max_dense_rows = inputs[-4:]
    _save(ctx, output, hidden, weight, labels, bias, temperature_tensor, mask, ids, offsets)


def _linear_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    hidden, weight, labels, bias, temperature_tensor, mask, ids, offsets, *saved = ctx.saved_tensors
    logprob, entropy, row_max, log_sum = saved
    backward = _op.vocab_parallel_linear_logprob_entropy_backward if ctx.shard else _op.linear_logprob_entropy_backward
    needs, place_of_bias = ctx.needs_input_grad, 3 + len(ctx.shard)
    # needs_input_grad leaves out arguments at the end that have their default value.
    wanted = [needs[0], needs[1], len(needs) > place_of_bias and needs[place_of_bias]]
    grads: list[Tensor | None] = [None, None, None]
    if grad_logprob is not None or grad_entropy is not None:
        found = backward.default(
            of_known_labels(grad_logprob, logprob), grad_entropy, hidden, weight, labels, *ctx.shard, bias, entropy,
            row_max, log_sum, ctx.temperature, temperature_tensor, ctx.logit_softcap, mask, ctx.max_grad_rows,
            ctx.logits_dtype, ctx.workspace_bytes, wanted, ids, offsets, ctx.include_label, ctx.max_dense_rows,
        )  # fmt: skip
        grads = [grad if want else None for grad, want in zip(found, wanted, strict=True)]
    return grads[0], grads[1], *[None] * (1 + len(ctx.shard)), grads[2], *[None] * 12


def _save_ratio(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, mask, groups, _, _, _, ctx.low, ctx.high = inputs
    ctx.save_for_backward(output, mask, groups)


def _ratio_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _op.importance_ratio_backward.default(grad, *ctx.saved_tensors, ctx.low, ctx.high), *[None] * 8


def _no_second_derivative(*_: Any) -> None:
    raise RuntimeError("d3s_kernels: its ops can be differentiated once, not twice")


_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "logprob_entropy": (_backward_without_kept_of, _save_without_kept_of),
    "vocab_parallel_logprob_entropy": (_logprob_entropy_backward, _save_logprob_entropy),
    "linear_logprob_entropy": (_linear_backward, _save_linear),
    "vocab_parallel_linear_logprob_entropy": (_linear_backward, _save_linear),
    "importance_ratio": (_ratio_backward, _save_ratio),
}
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _name in registered():
    if _name in _GRADIENTS:
        _backward, _save_inputs = _GRADIENTS[_name]
        torch.library.register_autograd(f"d3s_kernels::{_name}", _backward, setup_context=_save_inputs)
    elif _name.endswith("_backward"):
        torch.library.register_autograd(f"d3s_kernels::{_name}", _no_second_derivative)
    else:  # no gradient; without this, torch would attach a "not implemented" node to float outputs
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
