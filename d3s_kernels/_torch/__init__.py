"""The ops in plain PyTorch, for devices that have no kernels of their own.

Each function has the name, arguments and results of an op of ``csrc/library.cpp``; arguments that belong together, such
as a number and the tensor that replaces it, are one argument here. Arguments come checked, except for values on a GPU:
there invalid values give NaN or select nothing, as in the CUDA kernels. No function makes a host sync, except for a
sampling mask without ``max_dense_rows``. The result of a row or a segment has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._together import of_schema
from . import compact, group_advantages, kept_products, logprob_entropy, max_variance, ratios, topk_mask, topk_steps
from . import logprob_entropy_backward as backward

KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: of_schema(kernel)
    for kernel in (
        logprob_entropy.logprob_entropy,
        backward.logprob_entropy_backward,
        logprob_entropy.softmax_state_,
        logprob_entropy.softmax_state_finish,
        backward.logprob_entropy_backward_,
        kept_products.kept_logits,
        backward.kept_logits_backward,
        kept_products.kept_hidden_grad_,
        kept_products.kept_weight_grad_,
        topk_mask.topk_mask,
        topk_mask.select_tokens,
        topk_mask.select_tokens_from_logits,
        topk_steps.topk_order_keys,
        topk_steps.topk_count_digit,
        topk_steps.topk_choose_digit_,
        topk_steps.topk_mask_from_key,
        compact.compact,
        group_advantages.group_advantages,
        max_variance.max_variance_select,
        ratios.importance_ratio,
        ratios.importance_ratio_backward,
        ratios.entropy_groups,
        ratios.adaptive_clip,
    )
}
