"""TRL's own functions, if they can be imported on this machine.

On a GPU TRL runs its own Triton kernels, from `trl.kernels`, which imports little. Its torch functions are in
`trl.trainer.utils`, which imports many Hugging Face packages. On a GPU, `trl.trainer.utils` is imported only when its
functions are needed.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from . import inputs

ON_GPU = inputs.contests_of == "cuda"
TORCH_FUNCTIONS = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")


@contextmanager
def stand_in(name: str) -> Iterator[None]:
    """Replaces the package `datasets` if it is missing: TRL's import needs only the name of one class from it."""
    if name in sys.modules or find_spec(name):
        yield
        return
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.IterableDataset = type("IterableDataset", (), {})
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


def imported(name: str) -> ModuleType | None:
    """The module, or None if it cannot be imported. In that case the module's peers are missing, and all other
    contenders still run.
    """
    try:
        with stand_in("datasets"):
            return importlib.import_module(name)
    except Exception as problem:
        warnings.warn(f"{name} cannot be imported, and is missing among the peers: {problem!r}", stacklevel=2)
        return None


def imported_alone(package: str, *names: str) -> ModuleType | None:
    """Imports the named modules of a package, and returns the last one, or None as in `imported`. The packages that
    contain this package are not imported, since the packages of verl need Ray and tensordict. Empty packages replace
    them during the import. The empty packages are removed afterwards, so that the real ones can still be imported.
    """
    above = package.split(".")[:-1]
    around = [".".join(above[: depth + 1]) for depth in range(len(above))]
    folder, there = Path(find_spec(above[0]).origin).parent, {place: sys.modules.get(place) for place in around}
    for depth, place in enumerate(around):
        sys.modules[place] = ModuleType(place)
        sys.modules[place].__path__ = [str(folder.joinpath(*above[1 : depth + 1]))]
    try:
        return [imported(f"{package}.{name}") for name in names][-1]
    finally:
        for place, module in there.items():
            del sys.modules[place]
            if module:
                sys.modules[place] = module


def without_triton(module: ModuleType) -> Callable[..., Any]:
    """TRL's torch function on a GPU, changed so that it does not call TRL's Triton kernel."""
    scope = vars(module) | {"is_triton_available": lambda: False}
    for name in TORCH_FUNCTIONS:
        original = getattr(module, name)
        scope[name] = FunctionType(original.__code__, scope, name, original.__defaults__, original.__closure__)
    return scope["selective_log_softmax_and_entropy"]


@cache
def utils() -> ModuleType | None:
    return imported("trl.trainer.utils")


@cache
def torch_on_gpu() -> Callable[..., Any] | None:
    """The function that TRL ran on a GPU before TRL had a Triton kernel."""
    return without_triton(utils()) if ON_GPU and utils() else None


KERNELS = imported("trl.kernels") if ON_GPU else None
TRITON = getattr(KERNELS, "selective_log_softmax_and_entropy", None)
CHUNKED = getattr(KERNELS, "ChunkedLogProbFunction", None)  # its backward imports `utils`
