"""Every test of the ops on the GPU, by the back-end that D3S_KERNELS_BACKEND names, or the best that runs here."""

from __future__ import annotations

import pytest
from test_cuda_emulated import ABOVE_THE_KERNELS, SUITES, TESTS, run_pytest

from d3s_kernels._dispatch import backends

BACKEND = backends.runnable("cuda")[0]
FILES = [name for suite in SUITES for name in suite]
KERNELS = "cuda_shim/kernels.py"  # tests of what only the CUDA kernels have
# Triton has no kernels for these; plain PyTorch serves them, and its own run tests them.
NOT_IN_TRITON = {"test_compact.py", "test_group_advantages.py", "test_ratios.py", "test_topk_steps.py"}
# test_kernels.py tests once for each back-end what does not depend on the kernels.
LEFT_OUT = {"cuda": (), "triton": (*ABOVE_THE_KERNELS, *NOT_IN_TRITON), "torch": ABOVE_THE_KERNELS}


def suites() -> list[str]:
    return [name for name in FILES if name not in LEFT_OUT[BACKEND]] + [KERNELS] * (BACKEND == "cuda")


@pytest.mark.parametrize("name", suites())
def test_on_the_gpu(name: str) -> None:
    checked = {} if name == KERNELS else {"D3S_KERNELS_CHECK": "1"}
    run_pytest("-p", "on_cuda", str(TESTS / name), D3S_KERNELS_BACKEND=BACKEND, **checked)
