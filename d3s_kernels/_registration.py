"""What torch needs of Python for each op: a fake kernel and autograd.

The schemas are in ``csrc/library.cpp``. A fake kernel says shapes and dtypes and nothing else: arguments are checked
by the kernels themselves, whose ``std::invalid_argument`` reaches Python as ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_op = torch.ops.d3s_kernels

# ---- fake kernels ---------------------------------------------------------------------------------------------------


def _rows(like: Tensor, shape: Sequence[int], count: int = 4) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(shape, dtype=torch.float32) for _ in range(count))


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    register: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(f"d3s_kernels::{name}")
    return register


@_fake("logprob_entropy")
@_fake("vocab_parallel_logprob_entropy")
def _(logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _rows(logits, logits.shape[:-1])


@_fake("logprob_entropy_backward")
def _(grad_logprob: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@_fake("softmax_state_")
def _(state: Tensor, *_: Any, **__: Any) -> None:
    return None


@_fake("softmax_state_finish")
def _(state: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _rows(state, state.shape[-2:-1])


@_fake("topk_choose_digit_")
@_fake("wide_product_")
@_fake("logprob_entropy_backward_")
def _(*_: Any, **__: Any) -> None:
    return None


@_fake("linear_logprob_entropy")
@_fake("vocab_parallel_linear_logprob_entropy")
def _(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return _rows(hidden, hidden.shape[:-1])


@_fake("linear_logprob_entropy_backward")
@_fake("vocab_parallel_linear_logprob_entropy_backward")
def _(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    *others: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = others[-1]
    return (
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,)),
        weight.new_empty(weight.shape[:1] if wanted[2] else (0,)),
    )


@_fake("topk_mask")
def _(scores: Tensor, *_: Any, **__: Any) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.bool)


def _selection(entropy: Tensor, shape: Sequence[int], offsets: Tensor | None, pooled: bool) -> tuple[Tensor, ...]:
    segments: Sequence[int] = () if pooled else shape[:-1] if offsets is None else (offsets.shape[0] - 1,)
    return (
        entropy.new_empty(shape, dtype=torch.bool),
        entropy.new_empty(segments, dtype=torch.int32),
        entropy.new_empty(segments, dtype=torch.float32),
    )


@_fake("select_tokens")
def _(
    entropy: Tensor,
    advantages: Tensor,
    ratio: float | None = None,
    ratio_tensor: Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    pooled: bool = True,
    drop_zeros: bool = False,
) -> tuple[Tensor, ...]:
    return _selection(entropy, entropy.shape, offsets, pooled)


@_fake("select_tokens_from_logits")
def _(
    logits: Tensor,
    advantages: Tensor,
    ratio: float | None = None,
    ratio_tensor: Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    pooled: bool = True,
    drop_zeros: bool = False,
) -> tuple[Tensor, ...]:
    shape = logits.shape[:-1]
    chosen, count, threshold = _selection(logits, shape, offsets, pooled)
    return chosen, *_rows(logits, shape, 1), count, threshold


@_fake("topk_order_keys")
def _(scores: Tensor, *_: Any, **__: Any) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.int32)


@_fake("topk_count_digit")
def _(keys: Tensor, cut: Tensor, shift: int, bits: int, *_: Any, **__: Any) -> Tensor:
    return keys.new_empty((cut.shape[0], 1 << bits), dtype=torch.int64)


@_fake("topk_mask_from_key")
def _(keys: Tensor, cut: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    of_segments = (keys.new_empty(cut.shape[:1], dtype=torch.int64) for _ in range(2))
    return keys.new_empty(keys.shape, dtype=torch.bool), *of_segments


@_fake("compact")
def _(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    return mask.new_empty((capacity,), dtype=torch.int64), mask.new_empty((1,), dtype=torch.int64)


@_fake("group_advantages")
def _(rewards: Tensor, *_: Any, **__: Any) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=torch.float32)


@_fake("max_variance_select")
def _(values: Tensor, *_: Any, **__: Any) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.bool)


@_fake("importance_ratio")
@_fake("importance_ratio_backward")
@_fake("adaptive_clip")
def _(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    return tokens.new_empty(tokens.shape)


@_fake("entropy_groups")
def _(entropy: Tensor, *_: Any, **__: Any) -> Tensor:
    return entropy.new_empty(entropy.shape, dtype=torch.int8)


# ---- autograd -------------------------------------------------------------------------------------------------------
# Gradients that did not come stay None, so that entropy used as a score costs nothing in the backward.
#
# Where ranks share the vocabulary, two more arguments say which tokens a rank has, and the group. Incoming gradients
# are the same on all ranks, so each computes its own part of the gradient without asking the others.


def _of_known_labels(grad_logprob: Tensor | None, logprob: Tensor | None) -> Tensor | None:
    """A label that no rank has, which no rank knows by itself, gave NaN: so is what comes back through it."""
    if grad_logprob is None or logprob is None:
        return grad_logprob
    return torch.where(logprob.isnan() & (grad_logprob != 0), torch.nan, grad_logprob)


def _save(ctx: Any, output: tuple[Tensor, ...], *inputs: Tensor | None) -> None:
    logprob, entropy, row_max, log_sum = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.save_for_backward(*inputs, logprob if ctx.shard else None, entropy, row_max, log_sum)


def _save_logprob_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, *ctx.shard, ctx.temperature, temperature_tensor, mask = inputs
    _save(ctx, output, logits, labels, temperature_tensor, mask)


def _logprob_entropy_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    logits, labels, temperature_tensor, mask, logprob, entropy, row_max, log_sum = ctx.saved_tensors
    grad = None
    if grad_logprob is not None or grad_entropy is not None:
        grad = _op.logprob_entropy_backward.default(
            _of_known_labels(grad_logprob, logprob), grad_entropy, logits, labels, entropy, row_max, log_sum,
            ctx.temperature, temperature_tensor, mask, *ctx.shard[:1],
        )  # fmt: skip
    return grad, *[None] * (4 + len(ctx.shard))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, *ctx.shard, bias, ctx.temperature, temperature_tensor = inputs[:-6]
    ctx.logit_softcap, mask, _, ctx.max_grad_rows, ctx.logits_dtype, ctx.workspace_bytes = inputs[-6:]
    _save(ctx, output, hidden, weight, labels, bias, temperature_tensor, mask)


def _linear_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    hidden, weight, labels, bias, temperature_tensor, mask, logprob, entropy, row_max, log_sum = ctx.saved_tensors
    backward = _op.vocab_parallel_linear_logprob_entropy_backward if ctx.shard else _op.linear_logprob_entropy_backward
    needs, place_of_bias = ctx.needs_input_grad, 3 + len(ctx.shard)
    # Without the arguments at the end that have their default value.
    wanted = [needs[0], needs[1], len(needs) > place_of_bias and needs[place_of_bias]]
    grads: list[Tensor | None] = [None, None, None]
    if grad_logprob is not None or grad_entropy is not None:
        found = backward.default(
            _of_known_labels(grad_logprob, logprob), grad_entropy, hidden, weight, labels, *ctx.shard, bias, entropy,
            row_max, log_sum, ctx.temperature, temperature_tensor, ctx.logit_softcap, mask, ctx.max_grad_rows,
            ctx.logits_dtype, ctx.workspace_bytes, wanted,
        )  # fmt: skip
        grads = [grad if want else None for grad, want in zip(found, wanted, strict=True)]
    return grads[0], grads[1], *[None] * (1 + len(ctx.shard)), grads[2], *[None] * 8


for _backward, _save_inputs, _name in (
    (_logprob_entropy_backward, _save_logprob_entropy, "logprob_entropy"),
    (_linear_backward, _save_linear, "linear_logprob_entropy"),
):
    for _prefix in ("", "vocab_parallel_"):
        torch.library.register_autograd(f"d3s_kernels::{_prefix}{_name}", _backward, setup_context=_save_inputs)


def _save_ratio(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, mask, groups, _, _, _, ctx.low, ctx.high = inputs
    ctx.save_for_backward(output, mask, groups)


def _ratio_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _op.importance_ratio_backward.default(grad, *ctx.saved_tensors, ctx.low, ctx.high), *[None] * 8


def _no_second_derivative(*_: Any) -> None:
    raise RuntimeError("d3s_kernels: its ops can be differentiated once, not twice")


torch.library.register_autograd("d3s_kernels::importance_ratio", _ratio_backward, setup_context=_save_ratio)

for _name in (
    "logprob_entropy_backward",
    "linear_logprob_entropy_backward",
    "vocab_parallel_linear_logprob_entropy_backward",
    "importance_ratio_backward",
):
    torch.library.register_autograd(f"d3s_kernels::{_name}", _no_second_derivative)

# These have no gradient. Without this, torch would hang a "not implemented" on their float outputs.
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _name in (
    "topk_mask",
    "select_tokens",
    "select_tokens_from_logits",
    "topk_order_keys",
    "topk_count_digit",
    "topk_choose_digit_",
    "topk_mask_from_key",
    "compact",
    "group_advantages",
    "max_variance_select",
    "entropy_groups",
    "adaptive_clip",
):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
