"""Loads the compiled libraries, says which of them do not run here, and reads the schemas of their ops."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

import torch

from .build import FOLDER, build_info
from .faults import watch

torch.ops.load_library(str(FOLDER / "_cpu.so"))  # type: ignore[no-untyped-call]


_without_code: str | None = None  # why the CUDA library does not run on the GPUs, once these are known


def why_not_cuda() -> str | None:
    """Loads the CUDA library. Returns None, or the reason why it does not run here. Until torch initialises CUDA, it is
    not known which GPUs are here, and the library counts as one that has code for them.
    """
    return _why_it_does_not_load() or _without_code


@cache
def _why_it_does_not_load() -> str | None:
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


# ---- for which GPUs the CUDA library has code ------------------------------------------------------------------------

OLDEST = (8, 0)  # the lowest compute capability that the CUDA kernels can be compiled for


def look_for_code() -> None:
    """Compares the GPUs that this process sees with those that the CUDA library has code for. Initialises CUDA. Ops are
    dispatched by kind of device, so one GPU without code is enough for the library not to run here.
    """
    global _without_code
    architectures = build_info()["cuda_architectures"]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    lacking = [index for index, gpu in enumerate(gpus) if not has_code(architectures, (gpu.major, gpu.minor))]
    if lacking:
        gpu = gpus[lacking[0]]
        _without_code = (
            f"the CUDA library has no code for cuda:{lacking[0]}, {gpu.name} of compute capability {gpu.major}."
            f"{gpu.minor}, only for {architectures}; {how_to_get_code(architectures, (gpu.major, gpu.minor))}"
        )
        if len(lacking) < len(gpus):
            _without_code += "; CUDA_VISIBLE_DEVICES can hide a GPU from this process"


def has_code(architectures: str, capability: tuple[int, int]) -> bool:
    """Returns whether a library that is built for these architectures runs on a GPU of this compute capability.

    ``architectures`` is a list in CMake's notation. The entry ``90-real`` stands for machine code, which runs on GPUs
    with the same major version and the same or a higher minor version. The entry ``90-virtual`` stands for PTX, which
    runs on GPUs with the same or any later version. The entry ``90`` stands for machine code and PTX. Code for ``90a``
    runs only on GPUs of exactly this version, and code for ``100f`` as machine code does. If there is any other entry,
    such as ``native``, the library is assumed to have code for every GPU.
    """
    for name in architectures.split():
        entry = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", name)
        if entry is None:
            return True
        major, minor, features, kind = int(entry[1]), int(entry[2]), entry[3], entry[4]
        if features == "a":
            fits = (major, minor) == capability
        elif features == "f" or kind == "real":
            fits = major == capability[0] and minor <= capability[1]
        else:
            fits = (major, minor) <= capability
        if fits:
            return True
    return False


def how_to_get_code(architectures: str, capability: tuple[int, int]) -> str:
    """Says what to do about a GPU for which the CUDA library has no code."""
    if capability < OLDEST:
        return "nothing compiles for one so old: where Triton fails on it too, set D3S_KERNELS_BACKEND=torch"
    wanted = ";".join([*architectures.split(), "{}{}-real".format(*capability)])
    setting = f"-C cmake.define.CMAKE_CUDA_ARCHITECTURES='{wanted}'"
    return f"in a clone, this compiles it: pip install --no-build-isolation {setting} ."


# ---- what brings the CUDA library ------------------------------------------------------------------------------------

# The wheel for each platform and major version of CUDA. The CUDA runtime of a wheel works with all minor versions.
WHEELS = {"x86_64": {"12": "cu128", "13": "cu130"}, "aarch64": {"13": "cu130"}}


def how_to_get_cuda(cuda: str) -> str:
    """Says which command installs the CUDA library for a torch with this version of CUDA, or says that no wheel has
    it.
    """
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


# ---- the ops of the libraries ----------------------------------------------------------------------------------------


def schema_of(op: str) -> Any:
    """Returns the op's schema as parsed by torch."""
    return getattr(torch.ops.d3s_kernels, op).default._schema


def builtin(op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of torch's C++ that an OpOverload calls: without a frame of Python, a call takes 0.3 us
    less. Only torch.compile needs the OpOverload. Any other function is returned as it is, also one that wraps an
    OpOverload and has its attributes.
    """
    return getattr(op, "_op", op) if isinstance(op, torch._ops.OpOverload) else op


@cache
def argument_names(op: str) -> tuple[str, ...]:
    """Returns the names of an op's arguments, in the order of the op's schema."""
    return tuple(default_arguments(op))


@cache
def default_arguments(op: str) -> dict[str, Any]:
    """Returns the op's arguments and their defaults (None if there is no default), in the order of the op's schema."""
    return {argument.name: argument.default_value for argument in schema_of(op).arguments}


def named(op: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """Returns an op's arguments by name. Torch may leave out the last arguments if they have their default values."""
    return dict(zip(argument_names(op), arguments, strict=False))


def by_name(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel that takes the op's arguments by name, since torch passes them by position."""

    def call(*arguments: Any, **options: Any) -> Any:
        return kernel(**named(op, arguments), **options)

    return call


def registered() -> list[str]:
    """Returns the names of the ops that are registered with torch in the namespace ``d3s_kernels``."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    return sorted({name.partition(".")[0] for namespace, _, name in names if namespace == "d3s_kernels"})


COMPILED = tuple(registered())
"""The names of the ops that ``csrc/ops`` registers. The ops that are written in Python are declared later."""
