"""The ops in plain PyTorch, for devices that have no kernels of their own.

Each kernel has the name, the arguments and the results of an op of ``csrc/library.cpp``. But arguments of the op that
belong together, such as a number and the tensor that replaces it, are one argument of the kernel. All arguments have
been checked before, except values on a GPU: if they are invalid, they give NaN or select nothing, as in the CUDA
kernels. Only a sampling mask without ``max_dense_rows`` causes a host sync. The result for a row or a segment is
bitwise equal in any batch.
"""

from importlib import import_module
from pkgutil import iter_modules

from .kernels import FAKES, KERNELS

for _module in iter_modules(__path__):  # each module declares its ops
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAKES", "KERNELS"]
