"""The ops as functions, for the other packages. A function takes the arguments of its op's schema, by position, and
raises ValueError if the op refuses an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from . import faults
from .libraries import builtin
from .registration import EAGER, NO_GRAD, below_autograd

_Op = Callable[..., Any]
_op = torch.ops.d3s_kernels

# The error messages of compiled kernels for a refused argument and for a failed allocation.
_REFUSAL = re.compile(r"[a-z_]+: .*\b(takes|must|call)\b", re.DOTALL)
_NO_MEMORY = "d3s_kernels: out of memory"


def _with_usual_errors(op: _Op) -> _Op:
    """Wraps an op so that a refused argument raises ValueError, and a failed allocation raises torch.OutOfMemoryError,
    which trainers catch. Before the op runs, the wrapper warns of faults that earlier ops have met on a GPU.
    """

    eager, is_compiling, tell = builtin(op), torch.compiler.is_compiling, faults.tell

    @wraps(op)
    def call(*arguments: Any) -> Any:
        if is_compiling():
            return op(*arguments)
        tell()
        try:
            return eager(*arguments)
        except RuntimeError as error:
            if type(error) is RuntimeError and _REFUSAL.match(str(error)):
                raise ValueError(str(error)) from None
            if str(error).startswith(_NO_MEMORY):
                raise torch.OutOfMemoryError(str(error)) from None
            raise

    return call


def _past_torchs_autograd(op: _Op, differentiable: _Op, no_grad: _Op | None) -> _Op:
    """Wraps an op so that torch's autograd kernel is skipped. That kernel is Python code: it takes 4 us for each call,
    or 100 us with a gradient. If a gradient is needed, ``differentiable`` is called instead of the op; if none is
    needed, ``no_grad`` is called, which has no autograd kernel.
    """

    is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
    transforms = torch._C._functorch.peek_interpreter_stack
    any_requires_grad = torch._C._any_requires_grad
    eager, no_grad = builtin(op), no_grad and builtin(no_grad)

    @wraps(op)
    def call(*arguments: Any) -> Any:
        if is_compiling() or transforms() is not None:
            return op(*arguments)
        if is_grad_enabled() and any_requires_grad(*arguments):
            return differentiable(*arguments)
        if no_grad is not None:
            return no_grad(*arguments)
        with below_autograd():
            return eager(*arguments)

    return call


def _refuses_by_value_error() -> bool:
    """Returns whether a kernel's std::invalid_argument becomes a ValueError in Python (as up to torch 2.14). Otherwise
    it becomes a RuntimeError.
    """
    try:
        _op.compact.default(torch.empty(0, dtype=torch.bool), -1)
    except ValueError:
        return True
    except RuntimeError:
        return False
    raise AssertionError("compact takes a capacity of -1")


# If torch supports only CPUs, _with_usual_errors is needed at most for refused arguments: there are no faults to warn
# of, and torch's own RuntimeError for a failed allocation is not converted.
_on_cpus_alone = not (torch.backends.cuda.is_built() or torch.xpu._is_compiled())  # type: ignore[no-untyped-call]
_as_raised = _refuses_by_value_error() and _on_cpus_alone


def _public(op: _Op) -> _Op:
    return op if _as_raised and not faults.watches() else _with_usual_errors(op)


def function_of(name: str) -> _Op:
    """Returns the function that calls the op ``name``."""
    op = getattr(_op, name).default
    if name in EAGER:
        no_grad = getattr(_op, NO_GRAD[name]).default if name in NO_GRAD else None
        op = _past_torchs_autograd(op, EAGER[name], no_grad)
    return _public(op)


def check(op: str, *arguments: Any) -> None:
    """Raises the error that the op would raise for these arguments, without computing the op. Under torch.compile
    nothing is checked here: the op checks its arguments when it runs.
    """
    if not torch.compiler.is_compiling():
        _public(getattr(torch.ops.d3s_checks, op).default)(*arguments)


# ---- the ops that other packages call --------------------------------------------------------------------------------

# The schemas in csrc/ops/*.cpp say what an op takes and returns. The LM head calls the ops of its inner loops without
# these functions. The functions of the ops that over_supports.py and _lm_head declare are in those files.

logprob_entropy = function_of("logprob_entropy")

topk_mask = function_of("topk_mask")
select_tokens = function_of("select_tokens")
select_tokens_from_logits = function_of("select_tokens_from_logits")
compact = function_of("compact")
topk_order_keys = function_of("topk_order_keys")
topk_count_digit = function_of("topk_count_digit")
topk_choose_digit_ = function_of("topk_choose_digit_")
topk_mask_from_key = function_of("topk_mask_from_key")

group_advantages = function_of("group_advantages")
max_variance_select = function_of("max_variance_select")

importance_ratio = function_of("importance_ratio")
entropy_groups = function_of("entropy_groups")
adaptive_clip = function_of("adaptive_clip")
