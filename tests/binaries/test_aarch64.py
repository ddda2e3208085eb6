"""Runs the CPU's loops, compiled for aarch64, in an emulator. The cases are those for this processor, without times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import build_folder
from test_cuda_binary import TOOLS

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
CMAKE, NINJA = shutil.which("cmake", path=TOOLS), shutil.which("ninja", path=TOOLS)


@pytest.mark.skipif(
    None in (COMPILER, EMULATOR, CMAKE, NINJA), reason="needs g++-aarch64-linux-gnu and qemu-user-static"
)
@pytest.mark.parametrize("names", [("neon", "neon_bf16"), ("baseline",)], ids=lambda names: names[0])
def test_the_loops(names: tuple[str, ...]) -> None:
    level = names[0]
    folder = build_folder(f"aarch64-{level}")
    configure = [CMAKE, "-S", ROOT, "-B", folder, "-G", "Ninja", "-DD3S_CPP_TESTS=ON", "-DD3S_CUDA=OFF"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={NINJA}", f"-DPython_EXECUTABLE={sys.executable}", "-DD3S_WERROR=ON"]
    configure += [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'tools' / 'aarch64.cmake'}", f"-DD3S_GENERIC={level == 'baseline'}"]
    for command in (configure, [CMAKE, "--build", folder, "--target", "test_core", "test_loops"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for program, name in (("test_core", names[0]), *(("test_loops", name) for name in names)):
        run = subprocess.run(
            [EMULATOR, "-L", "/usr/aarch64-linux-gnu", folder / program],
            env=os.environ | {"D3S_KERNELS_SIMD": name},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert program == "test_core" or [f"{name} done"] == run.stdout.splitlines()[:-1]
