"""The peak memory of the LM head's backward on a CPU, measured: it is what is documented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from head_memory import CASES

from d3s_kernels._dispatch import backends

MIB = 1 << 20


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    # Every large block comes from the system and goes back to it, so that no freed one hides what is taken next.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(Path(__file__).parent / "head_memory.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow("that a process has no higher peak than the count that test_head_traffic.py holds to the page")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not report peaks")
@pytest.mark.parametrize("case", CASES)
def test_peak_memory_is_what_is_documented(case: str, measured: dict[str, int]) -> None:
    """Within 8 MiB, which the libraries of matrix products take. A slab of the weight's gradient has 16 MiB."""
    assert backends.forced_backend is None
    print(f"{case}: {measured[case] / MIB:.0f} MiB of {CASES[case].most / MIB:.0f}")
    assert measured[case] <= CASES[case].most + 8 * MIB
