"""Every op in plain PyTorch, for devices that have no kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
