"""The table of selection kernels in docs/gpu.md equals what is counted: launches, waves, registers and code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import test_cuda_binary
from test_cuda_emulated import CMAKE, CXX, build_plain

import d3s_kernels

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import selection_counts  # noqa: E402


@test_cuda_binary.built
@pytest.mark.skipif(CMAKE is None or CXX is None, reason="needs cmake and g++")
@pytest.mark.skipif(not (d3s_kernels.build_info()["cuda"] or "").startswith("13.0"), reason="needs code of nvcc 13.0")
@pytest.mark.skipif("sm_90" not in test_cuda_binary.ARCHITECTURES, reason="needs the kernels for an H100")
def test_the_page_has_what_is_counted() -> None:
    emulated, cuda = build_plain() / "_emulated.so", test_cuda_binary.library()
    text = selection_counts.PAGE.read_text(encoding="utf-8")
    counted = list(selection_counts.lines(emulated, cuda))
    print(*counted, sep="\n")
    missing = [line for line in counted if line not in text]
    again = f"run python tools/selection_counts.py {emulated} {cuda}"
    assert not missing, "\n".join(["docs/gpu.md lacks:", *missing, again])
    assert selection_counts.page(text, counted) == text, again
