"""Fake kernels: the shapes and dtypes of each op's results, for torch.compile and FakeTensorMode, and nothing else.

Arguments are checked by the kernels themselves, whose ``std::invalid_argument`` reaches Python as ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
def _(keys: Tensor, search: Tensor, shift: int, bits: int, *_: Any, **__: Any) -> Tensor:
    return keys.new_empty((search.shape[0], 1 << bits), dtype=torch.int64)


@_fake("topk_mask_from_key")
def _(keys: Tensor, search: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    of_segments = (keys.new_empty(search.shape[:1], dtype=torch.int64) for _ in range(2))
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
