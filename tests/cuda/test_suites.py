"""Every test of the ops, on the GPU; and what only the CUDA kernels have."""

from __future__ import annotations

import pytest
from test_cuda_emulated import SUITES, TESTS, run_pytest


@pytest.mark.parametrize("name", [name for suite in SUITES for name in suite] + ["cuda_shim/kernels.py"])
def test_on_the_gpu(name: str) -> None:
    checked = {} if name.startswith("cuda_shim") else {"D3S_KERNELS_CHECK": "1"}
    run_pytest("-p", "on_cuda", str(TESTS / name), **checked)
