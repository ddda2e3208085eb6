"""The ops in plain PyTorch, for devices that have no kernels of their own.

Each kernel has the name, arguments and results of an op of ``csrc/library.cpp``; arguments that belong together, such
as a number and the tensor that replaces it, are one argument here. Arguments come checked, except for values on a GPU:
there invalid values give NaN or select nothing, as in the CUDA kernels. No kernel makes a host sync, except for a
sampling mask without ``max_dense_rows``. The result of a row or a segment has the same bits in any batch.
"""

from importlib import import_module
from pkgutil import iter_modules

from .kernels import FAKES, KERNELS

for _module in iter_modules(__path__):  # each declares its ops
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAKES", "KERNELS"]
