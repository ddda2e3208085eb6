"""The loops compiled for SIMD levels other than the best one of this machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import layer, slow

from d3s_kernels import build_info

SCRIPT = """
import sys, d3s_kernels, pytest
level = sys.argv[1]
if d3s_kernels.build_info()["simd"] != level:
    sys.exit(77)  # this machine lacks it
sys.exit(pytest.main(["-m", "simd", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""

# Only files with such a test, because importing all others takes longer than these tests.
OTHERS = sorted({*Path(__file__).parent.glob("test_*.py")} - {Path(__file__)})
FILES = [str(path) for path in OTHERS if "mark.simd" in path.read_text(encoding="utf-8")]


BEST = build_info()["simd"]  # at which every other test runs
LEVELS = [
    # csrc/cpu/simd_level.h: a level *_bf16 has the loops of the level below it, except one.
    slow(level, shows="the product without bfloat16's instruction") if f"{level}_bf16" == BEST else level
    for level in build_info()["simd_levels"]
    if level != BEST
]


@pytest.mark.parametrize("level", LEVELS)
def test_accuracy(level: str, record_property: Callable) -> None:
    command, environment = [sys.executable, "-c", SCRIPT, level, *FILES], {**os.environ, "D3S_KERNELS_SIMD": level}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip(f"this machine has no {level}")
    assert run.returncode == 0, run.stdout + run.stderr
    record_property(*layer(f"the CPU's loops for {level}", run.stdout))
