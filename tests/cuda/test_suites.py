"""Every test of the ops, on the GPU, by one back-end: the one D3S_KERNELS_BACKEND names, or the best that runs here."""

from __future__ import annotations

import pytest
from test_cuda_emulated import ABOVE_THE_KERNELS, SUITES, TESTS, run_pytest

from d3s_kernels._dispatch import backends

BACKEND = backends.runnable("cuda")[0]
FILES = [name for suite in SUITES for name in suite]
KERNELS = "cuda_shim/kernels.py"  # what only the CUDA kernels have
# Plain PyTorch's, and run as such.
NOT_IN_TRITON = {"test_compact.py", "test_group_advantages.py", "test_ratios.py", "test_topk_steps.py"}
# What is above the kernels, test_kernels.py has once for each.
LEFT_OUT = {"cuda": (), "triton": (*ABOVE_THE_KERNELS, *NOT_IN_TRITON), "torch": ABOVE_THE_KERNELS}


def suites() -> list[str]:
    return [name for name in FILES if name not in LEFT_OUT[BACKEND]] + [KERNELS] * (BACKEND == "cuda")


@pytest.mark.parametrize("name", suites())
def test_on_the_gpu(name: str) -> None:
    checked = {} if name == KERNELS else {"D3S_KERNELS_CHECK": "1"}
    run_pytest("-p", "on_cuda", str(TESTS / name), D3S_KERNELS_BACKEND=BACKEND, **checked)
