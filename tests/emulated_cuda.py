"""A pytest plugin: in this process, the CUDA kernels, run on the CPU by tests/cuda_shim, replace the CPU kernels.

cd tests; D3S_EMULATED_LIBRARY=.../_emulated.so python -m pytest -p emulated_cuda test_topk_mask.py
"""

import importlib
import os

import torch
from cases.coverage import replaced, require_all, served_by

from d3s_kernels._dispatch import (  # imported first: it loads the CPU kernels, which are then replaced
    backends,
    faults,
    ops,
)

# New memory is filled with NaN and the largest integers, so that a kernel that reads what none has written shows.
# This function imports no compiler, as torch.use_deterministic_algorithms does.
torch.set_deterministic_debug_mode("warn")
torch.ops.load_library(os.environ["D3S_EMULATED_LIBRARY"])
faults.watch(os.environ["D3S_EMULATED_LIBRARY"])
importlib.reload(ops)  # its functions were made when nothing was watched
backends.SLICES["cpu"] = backends.GPU_SLICE
require_all("the emulated CUDA library replaces the CPU's kernels", replaced(), served_by("kernels"))
