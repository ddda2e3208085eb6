"""Ops in Triton, for GPUs without the compiled CUDA library. On these GPUs, plain PyTorch computes all other ops.
Imports ``_arguments``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import of_schema
from . import logprob_entropy, max_variance, topk_mask
from . import logprob_entropy_backward as backward


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``kernel`` so that the device of its tensors is the current device, on which Triton launches."""

    @wraps(kernel)
    def run(*arguments: Any, **options: Any) -> Any:
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        if device.type == "cpu":  # in the interpreter
            return kernel(*arguments, **options)
        with torch.accelerator.device_index(device.index):
            return kernel(*arguments, **options)

    return run


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: _on_its_device(of_schema(kernel))
    for kernel in (
        logprob_entropy.logprob_entropy,
        logprob_entropy.logprob_entropy_no_grad,
        logprob_entropy.softmax_state_,
        logprob_entropy.softmax_state_finish,
        backward.logprob_entropy_backward,
        backward.logprob_entropy_backward_,
        backward.logprob_entropy_backward_rows_,
        topk_mask.topk_mask,
        topk_mask.select_tokens,
        topk_mask.select_tokens_from_logits,
        max_variance.max_variance_select,
    )
}
