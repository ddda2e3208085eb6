"""Refuses plain tensors of a layout that no kernel reads (sparse, quantised, nested), and names the argument.

The dispatcher itself would say that an op "could not run with arguments from the 'SparseCPU' backend". So a kernel is
registered for these layouts, which raises a better error. Arguments of other layouts never reach it, and cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import require_readable
from .backends import DEVICES, is_built
from .faults import PUBLIC_OPS
from .libraries import COMPILED, argument_names

_LAYOUTS = ("Sparse", "SparseCsr", "Quantized", "NestedTensor")
_KEYS = ["MkldnnCPU", *(layout + key for layout in _LAYOUTS for device, key in DEVICES.items() if is_built(device))]


_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]


def refuse_unreadable(op: str) -> None:
    names = argument_names(op)

    def refuse(*arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | options
        require_readable(**{name.removesuffix("_tensor"): value for name, value in given.items()})
        raise AssertionError(f"one of {', '.join(given)} has a layout that require_readable takes")

    for key in _KEYS:
        _library.impl(op, refuse, key)  # type: ignore[no-untyped-call]


for _name in {*PUBLIC_OPS, "compact"}.intersection(COMPILED):
    refuse_unreadable(_name)
