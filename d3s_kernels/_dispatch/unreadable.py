"""Refuses, by the argument's name, plain tensors of a layout that no kernel reads: sparse, quantised and nested ones.

The dispatcher itself would say that an op "could not run with arguments from the 'SparseCPU' backend". Here it finds a
kernel for them, which raises. So an argument that is not of these is not looked at for this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._arguments import require_readable
from .backends import DEVICES, is_built
from .faults import PUBLIC_OPS
from .libraries import argument_names, registered

_LAYOUTS = ("Sparse", "SparseCsr", "Quantized", "NestedTensor")
_KEYS = ["MkldnnCPU", *(layout + key for layout in _LAYOUTS for device, key in DEVICES.items() if is_built(device))]


def _refusal(names: tuple[str, ...]) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | options
        require_readable(**{name.removesuffix("_tensor"): value for name, value in given.items()})
        raise AssertionError(f"one of {', '.join(given)} has a layout that require_readable takes")

    return refuse


_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _name in {*PUBLIC_OPS, "compact"}.intersection(registered()):
    for _key in _KEYS:
        _library.impl(_name, _refusal(argument_names(_name)), _key)  # type: ignore[no-untyped-call]
