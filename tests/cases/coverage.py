"""Checks that a suite has called every op that it has to call. The error names the missing ops."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from d3s_kernels._dispatch.libraries import registered

from .row import ServedBy
from .table import OPS


def served_by(*by: ServedBy) -> set[str]:
    """The names of the ops whose ``served_by`` in the table is one of these."""
    return {name for name, row in OPS.items() if row.served_by in by}


def replaced() -> set[str]:
    """The names of the ops whose CPU kernel another one has replaced."""
    return {op for op in registered() if "CPU (inactive)" in torch._C._dispatch_dump(f"d3s_kernels::{op}")}


def require_all(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Raises unless ``found`` and ``expected`` have the same ops."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(unknown)}"] * bool(unknown)
        raise AssertionError(f"{what}: {' and '.join(parts)}; see tests/cases")
