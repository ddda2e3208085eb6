"""The ops by name, for the other packages. Arguments that a kernel refuses raise ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_Op = Callable[..., Any]
_op = torch.ops.d3s_kernels

# The message of a compiled kernel about an argument that it refuses.
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
    """Up to torch 2.14 a kernel's std::invalid_argument reaches Python as ValueError, later as RuntimeError."""
    try:
        _op.compact.default(torch.empty(0, dtype=torch.bool), -1)
    except ValueError:
        return True
    except RuntimeError:
        return False
    raise AssertionError("compact takes a capacity of -1")


_public: Callable[[_Op], _Op] = (lambda op: op) if _refuses_by_value_error() else _refusal_as_value_error


def __getattr__(name: str) -> _Op:
    """The op of that name. It becomes a global of this module, so that the next access does not come here."""
    if name.startswith("__") or not hasattr(_op, name):
        raise AttributeError(f"d3s_kernels has no op {name!r}")
    globals()[name] = op = _public(getattr(_op, name).default)
    return op


def check(op: str, *arguments: Any) -> None:
    """Raises what the op would raise for these arguments, without computing it. In a graph the op checks them."""
    if not torch.compiler.is_compiling():
        _public(getattr(torch.ops.d3s_checks, op).default)(*arguments)
