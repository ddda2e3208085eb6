"""Fake kernels of the compiled ops: the shapes and dtypes of each op's results, for torch.compile and FakeTensorMode.

Only the real kernels check the arguments; their ``std::invalid_argument`` reaches Python as ValueError. A fake kernel
is called with all arguments by name, defaults included. It declares the arguments that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .libraries import by_name, schema_of


def _fake(*names: str) -> Callable[[Callable[..., Any]], None]:
    def register(kernel: Callable[..., Any]) -> None:
        for name in names:
            defaults = {argument.name: argument.default_value for argument in schema_of(name).arguments}
            torch.library.register_fake(f"d3s_kernels::{name}")(by_name(name, partial(kernel, **defaults)))

    return register


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def _rows(like: Tensor, shape: Sequence[int], count: int = 4) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(shape, dtype=torch.float32) for _ in range(count))


@_fake("logprob_entropy")
def _(logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return _rows(logits, logits.shape[:-1])


@_fake("softmax_state_finish")
def _(state: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return _rows(state, state.shape[-2:-1])


@_fake("kept_logits")
def _(hidden: Tensor, sampling_ids: Tensor, **_: Any) -> Tensor:
    return hidden.new_empty(sampling_ids.shape[0] + hidden.shape[0], dtype=torch.float32)


@_fake("kept_logits_backward")
def _(logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
    rows, places = logits.shape
    dtypes = torch.float32, torch.int32, torch.int32
    return *(logits.new_empty(places, dtype=dtype) for dtype in dtypes), logits.new_empty(rows, dtype=torch.bool)


@_fake(
    "softmax_state_", "logprob_entropy_backward_", "kept_hidden_grad_", "kept_weight_grad_", "wide_product_",
    "topk_choose_digit_",
)  # fmt: skip
def _(**_: Any) -> None:
    return None


@_fake("logprob_entropy_backward")
def _(logits: Tensor, **_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _like(name: str, dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """A fake kernel with one result, which has the shape of the argument ``name``."""

    def kernel(**given: Any) -> Tensor:
        like: Tensor = given[name]
        return like.new_empty(like.shape, dtype=dtype or like.dtype)

    return kernel


_fake("topk_mask")(_like("scores", torch.bool))
_fake("topk_order_keys")(_like("scores", torch.int32))


def _selection(entropy: Tensor, shape: Sequence[int], offsets: Tensor | None, pooled: bool) -> tuple[Tensor, ...]:
    segments: Sequence[int] = () if pooled else shape[:-1] if offsets is None else (offsets.shape[0] - 1,)
    return (
        entropy.new_empty(shape, dtype=torch.bool),
        entropy.new_empty(segments, dtype=torch.int32),
        entropy.new_empty(segments, dtype=torch.float32),
    )


@_fake("select_tokens")
def _(entropy: Tensor, offsets: Tensor | None, pooled: bool, **_: Any) -> tuple[Tensor, ...]:
    return _selection(entropy, entropy.shape, offsets, pooled)


@_fake("select_tokens_from_logits")
def _(logits: Tensor, offsets: Tensor | None, pooled: bool, **_: Any) -> tuple[Tensor, ...]:
    shape = logits.shape[:-1]
    chosen, count, threshold = _selection(logits, shape, offsets, pooled)
    return chosen, *_rows(logits, shape, 1), count, threshold


@_fake("topk_count_digit")
def _(keys: Tensor, search: Tensor, bits: int, **_: Any) -> Tensor:
    return keys.new_empty((search.shape[0], 1 << bits), dtype=torch.int64)


@_fake("topk_mask_from_key")
def _(keys: Tensor, search: Tensor, **_: Any) -> tuple[Tensor, ...]:
    of_segments = (keys.new_empty(search.shape[:1], dtype=torch.int64) for _ in range(2))
    return keys.new_empty(keys.shape, dtype=torch.bool), *of_segments


@_fake("compact")
def _(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    return mask.new_empty((capacity,), dtype=torch.int64), mask.new_empty((1,), dtype=torch.int64)


_fake("entropy_groups")(_like("entropy", torch.int8))
_fake("adaptive_clip")(_like("entropy"))
_fake("importance_ratio")(_like("logprob"))
_fake("importance_ratio_backward")(_like("ratio"))

# ---- rollouts -------------------------------------------------------------------------------------------------------

_fake("group_advantages")(_like("rewards", torch.float32))
_fake("max_variance_select")(_like("values", torch.bool))
