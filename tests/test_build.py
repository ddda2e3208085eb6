"""The built library: which torch symbols it needs, its effects on the process, and equal results at all SIMD levels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import d3s_kernels
from d3s_kernels._dispatch.build import FOLDER

ROOT = Path(__file__).parents[1]
LIBRARIES = [path for name in ("_cpu.so", "_cuda.so") if (path := FOLDER / name).exists()]
LEVELS = d3s_kernels.build_info()["simd_levels"]

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of the binutils that come with a compiler")


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    lines = subprocess.run(["nm", *options, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
    return [(fields[-2], fields[-1]) for fields in map(str.split, lines) if len(fields) >= 2]


def allowed_shims() -> dict[str, str]:
    lines = (Path(__file__).parent / "torch_shims.txt").read_text().splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


@needs_nm
def test_no_symbol_of_torch_is_newer_than_the_target_or_of_cxx() -> None:
    """A mangled name from torch or c10 would tie the binary to one torch release."""
    names = {name for library in LIBRARIES for _, name in symbols(library, "-D", "-u")}
    assert not [name for name in names if name.startswith("_Z") and re.search(r"(?<=\d)(c10|torch|at)(?=\d|E)", name)]
    wanted = {name for name in names if re.search("torch|aoti|c10", name)}
    assert wanted <= set(allowed_shims())
    if len(LIBRARIES) == 2:  # with CUDA, each symbol in the table is needed
        assert wanted == set(allowed_shims())
    target = tuple(map(int, d3s_kernels.build_info()["torch_target"].split(".")))
    assert all(since == "base" or tuple(map(int, since.split("."))) <= target for since in allowed_shims().values())


@pytest.mark.skipif(len(LEVELS) == 1, reason="one SIMD level")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.slow("that no symbol of a level can take the place of another's")
@pytest.mark.parametrize("source", ["softmax_rows.cpp", "order_key_loops.cpp"])
def test_a_simd_variant_exports_only_its_table(source: str, tmp_path: Path) -> None:
    """A weak symbol compiled for AVX-512 could replace a shared one, and crash on a machine without AVX-512."""
    out = tmp_path / "variant.o"
    features = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq")
    flags = ["-std=c++17", "-O3", "-w", *(f"-m{name}" for name in features)]
    file = ROOT / "csrc" / "cpu" / source
    subprocess.run(["g++", *flags, "-DD3S_LEVEL=avx512", "-c", str(file), "-o", str(out)], check=True)
    defined = [(kind, name) for kind, name in symbols(out) if kind not in "Utrbd"]
    assert [kind for kind, _ in defined] in (["R"], ["D"])


def test_the_process_keeps_its_denormals() -> None:
    assert torch.tensor(1e-40).mul(0.5).item() > 0


def test_build_info() -> None:
    info = d3s_kernels.build_info()
    assert info["version"] == d3s_kernels.__version__
    assert info["simd"] in info["simd_levels"]
    assert info["torch_target"] == "2.11"
