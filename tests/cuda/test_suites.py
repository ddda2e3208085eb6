"""Every test of the ops, on the GPU; and what only the CUDA kernels have."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_cuda_emulated import SUITES, TESTS, child_environment


@pytest.mark.parametrize("name", [name for suite in SUITES for name in suite] + ["cuda_shim/kernels.py"])
def test_on_the_gpu(name: str) -> None:
    checked = {} if name.startswith("cuda_shim") else {"D3S_KERNELS_CHECK": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "on_cuda", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        [*command, str(TESTS / name)],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
        env={**child_environment(), **checked},
    )
    print(done.stdout[-300:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
