"""The ops by name, as the other rooms call them: what a kernel refuses reaches Python as ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_Op = Callable[..., Any]
_op = torch.ops.d3s_kernels

# How a compiled kernel names an argument that it does not take.
_REFUSAL = re.compile(r"[a-z_]+: .*\b(takes|must|call)\b", re.DOTALL)


def _refusal_as_value_error(op: _Op) -> _Op:
    @wraps(op)
    def call(*arguments: Any) -> Any:
        try:
            return op(*arguments)
        except RuntimeError as error:
            if type(error) is RuntimeError and _REFUSAL.match(str(error)):
                raise ValueError(str(error)) from None
            raise

    return call


def _refuses_by_value_error() -> bool:
    """Up to torch 2.14 a kernel's std::invalid_argument reaches Python as ValueError, then as RuntimeError."""
    try:
        _op.compact.default(torch.empty(0, dtype=torch.bool), -1)
    except ValueError:
        return True
    except RuntimeError:
        return False
    raise AssertionError("compact takes a capacity of -1")


_public: Callable[[_Op], _Op] = (lambda op: op) if _refuses_by_value_error() else _refusal_as_value_error

logprob_entropy = _public(_op.logprob_entropy.default)
linear_logprob_entropy = _public(_op.linear_logprob_entropy.default)
vocab_parallel_logprob_entropy = _public(_op.vocab_parallel_logprob_entropy.default)
vocab_parallel_linear_logprob_entropy = _public(_op.vocab_parallel_linear_logprob_entropy.default)
topk_mask = _public(_op.topk_mask.default)
select_tokens = _public(_op.select_tokens.default)
select_tokens_from_logits = _public(_op.select_tokens_from_logits.default)
topk_order_keys = _public(_op.topk_order_keys.default)
topk_count_digit = _public(_op.topk_count_digit.default)
topk_choose_digit_ = _public(_op.topk_choose_digit_.default)
topk_mask_from_key = _public(_op.topk_mask_from_key.default)
compact = _public(_op.compact.default)
group_advantages = _public(_op.group_advantages.default)
max_variance_select = _public(_op.max_variance_select.default)
importance_ratio = _public(_op.importance_ratio.default)
entropy_groups = _public(_op.entropy_groups.default)
adaptive_clip = _public(_op.adaptive_clip.default)


def refuse(op: str, *arguments: Any) -> None:
    """Raises what the op would raise of its arguments, and computes nothing. In a graph the op does it when it runs."""
    if not torch.compiler.is_compiling():
        _public(getattr(torch.ops.d3s_checks, op).default)(*arguments)
