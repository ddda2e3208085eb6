"""A pytest plugin: in this process, ops on CPU tensors are computed on the GPU. So every test of the ops runs unchanged
on the kernels of one back-end.

    cd tests; D3S_KERNELS_BACKEND=cuda python -m pytest -p on_cuda test_topk_mask.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from d3s_kernels._dispatch import backends
from d3s_kernels._head.tiles import SIZES
from d3s_kernels._table.coverage import replaced, require_all, served_by
from d3s_kernels._table.outcomes import copied

GPU = torch.device("cuda")
OPS = sorted(served_by("kernels", "composed"))


def on_gpu(name: str) -> Any:
    op = getattr(torch.ops.d3s_kernels, name).default

    def run(*arguments: Any, **options: Any) -> Any:
        there: list[tuple[Tensor, Tensor]] = []

        def send(tensor: Tensor) -> Tensor:
            there.append((tensor, copied(tensor, GPU)))
            return there[-1][1]

        sent, sent_options = tree_map_only(Tensor, send, (arguments, options))
        result = op(*sent, **sent_options)
        if name.endswith("_"):
            for here, moved in there:
                here.copy_(moved)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)

    return run


assert backends.forced_backend in backends.serving("cuda"), "D3S_KERNELS_BACKEND names the back-end"
_library = torch.library.Library("d3s_kernels", "IMPL")
for _name in OPS:
    _library.impl(_name, on_gpu(_name), "CPU", allow_override=True)
SIZES["cpu"], backends.SLICES["cpu"] = SIZES["cuda"], backends.GPU_SLICE
require_all("the GPU's kernels replace the CPU's", replaced(), OPS)
