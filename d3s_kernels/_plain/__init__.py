"""Every op in plain PyTorch, for devices that have no kernels of their own.

A function for each op of ``csrc/library.cpp``, with its name, arguments and results. Arguments come checked; values
that nobody looked at, on a GPU, do as in the CUDA kernels: NaN, or nothing selected. No function waits for the device,
and a row's or a segment's result has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import compact, gradients, key_search, ratios, rollouts, top, vocabulary

KERNELS: dict[str, Callable[..., Any]] = {
    "logprob_entropy": vocabulary.logprob_entropy,
    "logprob_entropy_backward": gradients.logprob_entropy_backward,
    "softmax_state_": vocabulary.softmax_state_,
    "softmax_state_finish": vocabulary.softmax_state_finish,
    "logprob_entropy_backward_": gradients.logprob_entropy_backward_,
    "topk_mask": top.topk_mask,
    "select_tokens": top.select_tokens,
    "select_tokens_from_logits": top.select_tokens_from_logits,
    "topk_order_keys": key_search.topk_order_keys,
    "topk_count_digit": key_search.topk_count_digit,
    "topk_choose_digit_": key_search.topk_choose_digit_,
    "topk_mask_from_key": key_search.topk_mask_from_key,
    "compact": compact.compact,
    "group_advantages": rollouts.group_advantages,
    "max_variance_select": rollouts.max_variance_select,
    "importance_ratio": ratios.importance_ratio,
    "importance_ratio_backward": ratios.importance_ratio_backward,
    "entropy_groups": ratios.entropy_groups,
    "adaptive_clip": ratios.adaptive_clip,
}
