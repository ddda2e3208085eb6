"""The ops in plain PyTorch, for devices and ops without a compiled kernel or a Triton kernel. Imports ``_arguments``
and ``_segments``.

Each kernel computes the op of ``csrc/ops`` with the same name. Some arguments of the op, such as
``temperature`` and ``temperature_tensor``, are combined into one argument of the kernel (``_arguments/bundles.py``).
Arguments are checked before a kernel runs. Only the values of tensors on a GPU are not checked: as in the CUDA kernels,
an invalid value gives NaN or selects nothing. No kernel causes a host sync. The result for a row or a segment is
bitwise equal in every batch.
"""

from importlib import import_module
from pkgutil import iter_modules

from .kernels import FAKES, KERNELS

for _module in iter_modules(__path__):  # importing a module declares its ops
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAKES", "KERNELS"]
