"""The ops as attributes of this module, for the other packages. An op raises ValueError if it refuses an argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from . import faults
from .registration import EAGER

_Op = Callable[..., Any]
_op = torch.ops.d3s_kernels

# The error messages of compiled kernels for a refused argument and for a failed allocation.
_REFUSAL = re.compile(r"[a-z_]+: .*\b(takes|must|call)\b", re.DOTALL)
_NO_MEMORY = "d3s_kernels: out of memory"


def _with_usual_errors(op: _Op) -> _Op:
    """Wraps an op so that a refused argument raises ValueError, and a failed allocation raises torch.OutOfMemoryError,
    which trainers catch. Before the op runs, the wrapper warns of faults that earlier ops have met on a GPU.
    """

    @wraps(op)
    def call(*arguments: Any) -> Any:
        faults.tell()
        try:
            return op(*arguments)
        except RuntimeError as error:
            if type(error) is RuntimeError and _REFUSAL.match(str(error)):
                raise ValueError(str(error)) from None
            if str(error).startswith(_NO_MEMORY):
                raise torch.OutOfMemoryError(str(error)) from None
            raise

    return call


def _past_torchs_autograd(op: _Op, differentiable: _Op) -> _Op:
    """Wraps an op so that torch's autograd kernel is skipped. That kernel is Python code: it takes 4 us for each call,
    or 100 us with a gradient. If a gradient is needed, ``differentiable`` is called instead of the op.
    """

    is_compiling, transforms = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack
    any_requires_grad, below_autograd = torch._C._any_requires_grad, torch._C._AutoDispatchBelowAutograd

    @wraps(op)
    def call(*arguments: Any) -> Any:
        if is_compiling() or transforms() is not None:
            return op(*arguments)
        if torch.is_grad_enabled() and any_requires_grad(*arguments):
            return differentiable(*arguments)
        with below_autograd():
            return op(*arguments)

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


def __getattr__(name: str) -> _Op:
    """Returns the op, and makes it a global of this module, so that later accesses do not call this function."""
    if name.startswith("__") or not hasattr(_op, name):
        raise AttributeError(f"d3s_kernels has no op {name!r}")
    op = _public(getattr(_op, name).default)
    if name in EAGER:
        op = _past_torchs_autograd(op, _public(EAGER[name]))
    globals()[name] = op
    return op


def check(op: str, *arguments: Any) -> None:
    """Raises the error that the op would raise for these arguments, without computing the op. Under torch.compile
    nothing is checked here: the op checks its arguments when it runs.
    """
    if not torch.compiler.is_compiling():
        _public(getattr(torch.ops.d3s_checks, op).default)(*arguments)
