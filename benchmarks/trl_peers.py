"""TRL's own functions, as far as this machine has them.

On a GPU TRL runs Triton kernels of its own: `trl.kernels` holds them and needs little. Its torch functions lie in
`trl.trainer.utils`, which imports half of Hugging Face.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from . import inputs

ON_GPU = inputs.device.type == "cuda"
TORCH_FUNCTIONS = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")


@contextmanager
def stand_in(name: str) -> Iterator[None]:
    """TRL imports `datasets` for the name of one class: where it is missing, a module that has only that will do."""
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
    """A peer that cannot be imported is missing, and is reported so; the rest is measured."""
    try:
        with stand_in("datasets"):
            return importlib.import_module(name)
    except Exception as problem:
        warnings.warn(f"{name} cannot be imported, and is missing among the peers: {problem!r}", stacklevel=2)
        return None


def without_triton(module: ModuleType) -> Callable[..., Any]:
    """TRL's torch functions on a GPU, where they would hand over to its Triton kernel."""
    scope = vars(module) | {"is_triton_available": lambda: False}
    for name in TORCH_FUNCTIONS:
        original = getattr(module, name)
        scope[name] = FunctionType(original.__code__, scope, name, original.__defaults__, original.__closure__)
    return scope["selective_log_softmax_and_entropy"]


UTILS = imported("trl.trainer.utils")
KERNELS = imported("trl.kernels") if ON_GPU else None
TRITON = getattr(KERNELS, "selective_log_softmax_and_entropy", None)
CHUNKED = getattr(KERNELS, "ChunkedLogProbFunction", None) if UTILS else None  # its backward imports UTILS
TORCH = without_triton(UTILS) if ON_GPU and UTILS else None
