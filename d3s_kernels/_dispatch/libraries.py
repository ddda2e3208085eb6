"""The compiled libraries: where they lie, and which of them load here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .._build import FOLDER

torch.ops.load_library(str(FOLDER / "_cpu.so"))  # type: ignore[no-untyped-call]
torch.ops.load_library(str(FOLDER / "_checks.so"))  # type: ignore[no-untyped-call]


@cache
def why_not_cuda() -> str | None:
    """Loads the CUDA library. Returns None, or the reason why it does not load here."""
    library = FOLDER / "_cuda.so"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not library.exists():
        return f"this build has no CUDA library; a wheel for CUDA {torch.version.cuda} has one (docs/install.md)"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the CUDA library does not load: {error}"
    return None


def argument_names(op: str) -> list[str]:
    """The names of an op's arguments, in the order of its schema."""
    return [argument.name for argument in getattr(torch.ops.d3s_kernels, op).default._schema.arguments]


def by_name(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, called with the op's arguments by name. Torch may leave out those at the end that have their default
    value.
    """
    names = argument_names(op)

    def call(*arguments: Any, **options: Any) -> Any:
        return kernel(**dict(zip(names, arguments, strict=False)), **options)

    return call


def registered() -> list[str]:
    """The ops of the namespace that are registered with torch: those of ``csrc/library.cpp``."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("d3s_kernels::").partition(".")[0] for name in names if name.startswith("d3s_kernels::")}
    return sorted(found)
