"""Tests the loops as `make demo` compiles them, only for this processor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import build_folder

import d3s_kernels as d3s

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent  # a system's CMake may be too old
CMAKE, NINJA = shutil.which("cmake", path=TOOLS), shutil.which("ninja", path=TOOLS)


@pytest.mark.skipif(None in (CMAKE, NINJA), reason="needs cmake and ninja in the environment")
def test_only_the_loops_of_this_processor_are_compiled() -> None:
    folder, best = build_folder("first-look"), d3s.build_info()["simd"]
    configure = [CMAKE, "-S", ROOT, "-B", folder, "-G", "Ninja", "-DD3S_FIRST_LOOK=ON", "-DD3S_CPP_TESTS=ON"]
    configure += ["-DD3S_CUDA=OFF", f"-DCMAKE_MAKE_PROGRAM={NINJA}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if name != "D3S_KERNELS_SIMD"}
    for command in (configure, [CMAKE, "--build", folder, "--target", "test_loops"]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    compiled = sorted(path.name for path in folder.glob("CMakeFiles/loops_*.dir"))
    assert compiled == sorted({f"loops_{best.removesuffix('_bf16')}.dir", f"loops_{best}.dir"})
    # No lower level is compiled, so none can be chosen.
    for asked in ("baseline", best):
        run = subprocess.run(
            [folder / "test_loops"], capture_output=True, text=True, env=environment | {"D3S_KERNELS_SIMD": asked}
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.splitlines()[0] == f"{best} done"


def test_a_processor_without_the_compiled_loops_is_told(tmp_path: Path) -> None:
    """As if the environment of a first look was moved to an older machine."""
    (tmp_path / "compiled_levels.h").write_text(
        "#define D3S_LEVELS(X, table)\n#define D3S_BF16_LEVELS(X, table) X(neon_bf16, table) X(avx512_bf16, table)\n"
    )
    (tmp_path / "main.cpp").write_text(
        f'#include <cstdio>\n#include <exception>\n#include "{ROOT}/csrc/cpu/simd_level.cpp"\n'
        "int main() { try { d3s::simd_level(); } catch (const std::exception& e) { std::puts(e.what()); } }\n"
    )
    subprocess.run(["g++", "-std=c++17", f"-I{tmp_path}", tmp_path / "main.cpp", "-o", tmp_path / "main"], check=True)
    said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    if d3s.build_info()["simd"] != "neon_bf16":  # no other processor runs the first of the two, so none is reached
        assert "compiled for neon_bf16 and avx512_bf16 alone, which this processor does not have" in said
