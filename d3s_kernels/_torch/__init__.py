"""The ops in plain PyTorch, for devices and ops without a compiled kernel or a Triton kernel.

Each kernel computes the op of ``csrc/library.cpp`` that has the kernel's name. A kernel has the arguments and results
of its op, with one difference: arguments of the op that belong together, such as a number and the tensor that replaces
the number, are one argument of the kernel. Arguments have been checked before a kernel is called, except for the values
of tensors on a GPU. As in the CUDA kernels, an invalid value on a GPU gives NaN, or nothing is selected. A kernel
causes a host sync only if it has a sampling mask without ``max_dense_rows``. The result for a row or a segment is
bitwise equal in every batch.
"""

from importlib import import_module
from pkgutil import iter_modules

from .kernels import FAKES, KERNELS

for _module in iter_modules(__path__):  # importing a module declares its ops
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAKES", "KERNELS"]
