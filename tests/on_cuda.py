"""A pytest plugin: in this process, ops on CPU tensors are computed on the GPU. So every test of the ops runs unchanged
on the kernels of one back-end. tests/cuda/suites.py says which tests.

    cd tests; D3S_KERNELS_BACKEND=cuda python -m pytest -p on_cuda test_topk_mask.py

D3S_TEST_DEVICE=cpu has the CPU's own kernels called in the same way, to see that the tests themselves run.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from cases.coverage import replaced, require_all, served_by
from gpu_faults import pytest_runtest_call, pytest_runtest_logreport  # noqa: F401  hooks of this plugin
from torch import Tensor
from torch.utils._pytree import tree_map_only

from d3s_kernels._dispatch import backends
from d3s_kernels._dispatch.libraries import argument_names
from d3s_kernels._lm_head.tiles import SIZES
from d3s_kernels.check.compare import copied
from d3s_kernels.check.tolerances import written_arguments

GPU = torch.device(os.environ.get("D3S_TEST_DEVICE", "cuda"))
OPS = sorted(served_by("kernels", "composed"))


def kernel_of(name: str) -> Any:
    if GPU.type == "cuda":
        return getattr(torch.ops.d3s_kernels, name).default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return partial(torch.library.get_kernel(f"d3s_kernels::{name}", "CPU").call_boxed, keys)


def on_gpu(name: str) -> Any:
    op, written = kernel_of(name), written_arguments(name)
    names = argument_names(name)

    def run(*arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | options
        sent = tree_map_only(Tensor, lambda tensor: copied(tensor, GPU), given)
        result = op(**sent)
        for argument in written:  # what is only read may be expanded, and takes no copy
            if given.get(argument) is not None:
                given[argument].copy_(sent[argument])
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)

    return run


_library = torch.library.Library("d3s_kernels", "IMPL")
for _name in OPS:
    _library.impl(_name, on_gpu(_name), "CPU", allow_override=True)
if GPU.type == "cuda":
    assert backends.forced_backend in backends.serving("cuda"), "D3S_KERNELS_BACKEND names the back-end"
    SIZES["cpu"], backends.SLICES["cpu"] = SIZES["cuda"], backends.GPU_SLICE
require_all("the GPU's kernels replace the CPU's", replaced(), OPS)
