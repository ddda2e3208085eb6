"""For which GPUs a build compiles the CUDA kernels, beside an nvidia-smi and an nvcc that only say what is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SH, SLEEP = shutil.which("sh"), shutil.which("sleep")
CMAKE = shutil.which("cmake", path=Path(sys.executable).parent)  # a system's may be too old
ALL = "80-real 86-real 89-real 90-real 100-real 120"
KNOWN = "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121"  # what this nvcc compiles for

pytestmark = pytest.mark.skipif(None in (SH, SLEEP, CMAKE), reason="needs sh, sleep, and cmake in the environment")


@pytest.fixture(scope="module")
def cmake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program itself: a package of Python starts it by a script, which takes longer than it does."""
    script = tmp_path_factory.mktemp("cmake") / "where.cmake"
    script.write_text("message(STATUS ${CMAKE_COMMAND})")
    done = subprocess.run([CMAKE, "-P", script], capture_output=True, text=True, check=True)
    return done.stdout.removeprefix("-- ").strip()


def answers(folder: Path, name: str, code: str) -> None:
    (folder / name).write_text(f"#!{SH}\n{code}\n")
    (folder / name).chmod(0o755)


def chosen(cmake: str, folder: Path, nvidia_smi: str | None, *options: str, seconds: float = 60, **others: str) -> str:
    """The line that the build prints. The architectures in it are those that it passes to the compiler."""
    answers(folder, "nvcc", f"echo {KNOWN}")
    if nvidia_smi is not None:
        answers(folder, "nvidia-smi", nvidia_smi)
    script = folder / "script.cmake"
    script.write_text(
        f'cmake_minimum_required(VERSION 3.26)\ninclude("{ROOT}/csrc/gpus.cmake")\n'
        f'd3s_choose_gpus("{folder}/nvcc" {seconds})\nmessage(STATUS "${{CMAKE_CUDA_ARCHITECTURES}}")\n'
    )
    environment = {"PATH": str(folder)} | others
    done = subprocess.run([cmake, *options, "-P", script], env=environment, capture_output=True, text=True)
    if done.returncode:
        return " ".join(done.stderr.split())
    line, architectures = done.stdout.removeprefix("-- CUDA kernels for ").splitlines()
    assert line.partition(":")[0] == architectures.removeprefix("-- ").replace(";", " ")
    return line


def test_the_gpus_that_are_here(cmake: str, tmp_path: Path) -> None:
    for capabilities, line in (
        ("9.0 9.0 8.0 10.3 12.1", "80-real 90-real 103-real 121-real: the GPUs here"),
        ("7.5 8.6", "86-real: the GPUs here"),
        ("7.5", f"{ALL}: all, because no GPU here has compute capability 8.0 or higher"),
        ("9.0 13.0", f"{ALL}: all, because nvcc does not know compute capability 13.0, which a GPU here has"),
    ):
        assert chosen(cmake, tmp_path, f"printf '%s\\n' {capabilities}") == line


def test_no_gpu_is_seen(cmake: str, tmp_path: Path) -> None:
    for nvidia_smi, why in (
        (None, "no such file or directory"),
        ("echo broken; exit 9", "exit status 9"),
        ("echo 'No devices were found'", "it says 'No devices were found'"),
        ("echo '[N/A;'; echo 9.0", "it says '[N/A;'"),
        ("exit 0", "it says ''"),
    ):
        assert chosen(cmake, tmp_path, nvidia_smi) == f"{ALL}: all, because nvidia-smi shows no GPU here: {why}"
    line = chosen(cmake, tmp_path, f"exec {SLEEP} 60", seconds=0.1)
    assert line.startswith(f"{ALL}: all, because nvidia-smi shows no GPU here: ")
    assert line.endswith("timeout")


def test_what_is_given_comes_first(cmake: str, tmp_path: Path) -> None:
    """The nvidia-smi here leaves a trace where it is asked."""
    given, crossing = "-DCMAKE_CUDA_ARCHITECTURES=", ["-DCMAKE_CROSSCOMPILING=ON", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    for options, environment, line in (
        ([f"{given}89;90"], {"CUDAARCHS": "80"}, "89 90: as CMAKE_CUDA_ARCHITECTURES says"),
        ([given, "-DD3S_GPUS=all"], {"CUDAARCHS": "89"}, "89: as CUDAARCHS says"),
        (["-DD3S_GPUS=all"], {}, f"{ALL}: all, as D3S_GPUS says"),
        (crossing, {}, "90-real 100-real 120: all, in a build for another machine"),
        ([given], {}, "90-real: the GPUs here"),
    ):
        assert chosen(cmake, tmp_path, f": > '{tmp_path}/asked'; echo 9.0", *options, **environment) == line
        assert (tmp_path / "asked").exists() == line.endswith("here")
    assert "D3S_GPUS: got 'some'; takes here or all" in chosen(cmake, tmp_path, None, "-DD3S_GPUS=some")
