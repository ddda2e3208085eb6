"""The compiled libraries: where they are, and which of them load here."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

import torch

from .._build import FOLDER, build_info
from .faults import watch

torch.ops.load_library(str(FOLDER / "_cpu.so"))  # type: ignore[no-untyped-call]


@cache
def why_not_cuda() -> str | None:
    """Loads the CUDA library. Returns None, or the reason why it does not load here."""
    library = FOLDER / "_cuda.so"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not library.exists():
        return f"this build has no CUDA library; {how_to_get_cuda(torch.version.cuda)}"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the CUDA library does not load: {error}"
    watch(str(library))
    return None


# The wheel for each major version of CUDA. One wheel is enough for all minor versions, since the runtime works with
# them all.
WHEELS = {"x86_64": {"12": "cu128", "13": "cu130"}, "aarch64": {"13": "cu130"}}


def how_to_get_cuda(cuda: str) -> str:
    """The command that installs the wheel with the CUDA library, for a torch built with this version of CUDA."""
    wheel = WHEELS.get(platform.machine(), {}).get(cuda.partition(".")[0])
    if wheel is None or sys.platform != "linux":
        return f"no wheel has one for CUDA {cuda} on this platform: build from source where there is nvcc"
    try:
        urls = metadata("d3s_kernels").get_all("Project-URL") or []
    except PackageNotFoundError:  # the package was not installed, but copied
        urls = []
    site = dict(url.split(", ", 1) for url in urls).get("Documentation", "https://SITE")
    version = build_info()["version"].partition("+")[0]
    return f"this brings it: pip install --no-deps --index-url {site}/simple 'd3s_kernels=={version}+{wheel}'"


def schema_of(op: str) -> Any:
    """The parsed schema of the op, from ``csrc/library.cpp``."""
    return getattr(torch.ops.d3s_kernels, op).default._schema


@cache
def argument_names(op: str) -> tuple[str, ...]:
    """The names of an op's arguments, in the order of its schema."""
    return tuple(default_arguments(op))


@cache
def default_arguments(op: str) -> dict[str, Any]:
    """The op's arguments in the order of its schema, with their defaults. The value is None for an argument without a
    default.
    """
    return {argument.name: argument.default_value for argument in schema_of(op).arguments}


def by_name(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel that takes the op's arguments by name. Torch passes them by position, and may leave out the last
    arguments if they have their default values.
    """
    names = argument_names(op)

    def call(*arguments: Any, **options: Any) -> Any:
        return kernel(**dict(zip(names, arguments, strict=False)), **options)

    return call


def registered() -> list[str]:
    """The ops of the namespace that are registered with torch."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    return sorted({name.partition(".")[0] for namespace, _, name in names if namespace == "d3s_kernels"})


COMPILED = tuple(registered())
"""The ops of ``csrc/library.cpp``. The ops of ``_head/op.py`` are declared later."""
