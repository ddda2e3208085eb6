"""The source of the CUDA kernels, run on the CPU: against the reference, under AddressSanitizer, and with the threads
of a block in a different order each time. This needs a C++ compiler and CMake, but no GPU and no nvcc."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import EVERYTHING, build_folder, layer, ratio_results, slow

import d3s_kernels

sys.path.append(str(Path(__file__).parent / "cuda"))
from suites import GROUPS

TESTS = Path(__file__).parent
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
CMAKE = shutil.which("cmake", path=TOOLS)
CXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(CMAKE is None or CXX is None, reason="needs cmake and g++")

# Left to `make test-all`: tests that take 40 s here, whose kernels are also in cuda_shim/kernels.py and the table.
LEFT_OUT = ("test_sampling_masks_head.py",)
# Each child process imports torch and the library again, so `make test` starts only one.
RUNS = GROUPS if EVERYTHING else (tuple(name for name in sum(GROUPS, ()) if name not in LEFT_OUT),)


def build(folder: Path, *options: str) -> Path:
    """Builds the emulated library in a folder that the next run reuses. Only one process builds at a time."""
    root = Path(torch.__file__).parent
    configure = [CMAKE, "-S", str(TESTS / "cuda_shim"), "-B", str(folder), f"-DTORCH_ROOT={root}", *options]
    if shutil.which("ninja", path=TOOLS):
        configure += ["-G", "Ninja"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, [CMAKE, "--build", str(folder), "--parallel", "2"]):
            environment = {**os.environ, "PATH": TOOLS}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build_plain() -> Path:
    return build(build_folder(f"emulated-torch-{torch.__version__}"))


@pytest.fixture(scope="module")
def plain() -> Path:
    return build_plain()


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return build(build_folder(f"emulated-sanitized-torch-{torch.__version__}"), "-DD3S_SANITIZE=ON")


def run_pytest(*arguments: str, **environment: str) -> str:
    """Runs pytest in a child process, in which other kernels replace the CPU's. Returns its output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", *arguments]
    path = [str(Path(d3s_kernels.__file__).parents[1]), os.environ.get("PYTHONPATH")]  # this same package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS, env=environment)
    print(done.stdout[-300:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def run_emulated(library: Path, *arguments: str, **environment: str) -> str:
    environment["D3S_EMULATED_LIBRARY"] = str(library / "_emulated.so")
    return run_pytest("-p", "emulated_cuda", *arguments, **environment)


# With fibres in place of threads, an example takes a hundred times as long as on the CPU kernels.
EXAMPLES = os.environ.get("D3S_TEST_EXAMPLES", "40" if EVERYTHING else "5")


@pytest.mark.parametrize("suite", RUNS, ids=lambda suite: suite[0])
def test_the_table_and_the_edges_of_the_ops(suite: tuple[str, ...], plain: Path, record_property: Callable) -> None:
    seed = str(secrets.randbits(31))
    print(f"D3S_SHIM_SEED={seed} runs the threads in the same order again")
    files = [str(TESTS / name) for name in suite]
    printed = run_emulated(plain, *files, D3S_KERNELS_CHECK="1", D3S_SHIM_SEED=seed, D3S_TEST_EXAMPLES=EXAMPLES)
    record_property(*layer("the ops on the CUDA kernels, emulated", printed))


# At full strength, these tests take minutes, so two processes share them.
KERNELS = (str(TESTS / "cuda_shim" / "kernels.py"), *(("-n", "2") if EVERYTHING else ()))


def test_what_only_the_cuda_kernels_have(plain: Path, tmp_path: Path, record_property: Callable) -> None:
    torch.save(ratio_results(), tmp_path / "ratios.pt")  # of the CPU's kernels, for a test of equal bits
    printed = run_emulated(plain, *KERNELS, D3S_RATIOS_OF_CPU=str(tmp_path / "ratios.pt"), D3S_TEST_SPREAD="1")
    record_property(*layer("what only the CUDA kernels have, emulated", printed))


@pytest.mark.slow("that no kernel reads or writes out of bounds; `make sanitize` runs it too")
def test_under_address_sanitizer(sanitized: Path) -> None:
    """All tests except the grids of 70,000 blocks and the thousand orders, which take minutes here."""
    run_emulated(
        sanitized,
        *(*KERNELS, "-k", "not a_grid_is_wide and not thousand_orders"),
        # Python and torch are not sanitized, so the sanitizers' libraries have to be loaded first.
        LD_PRELOAD=" ".join(runtime(name) for name in ("libasan.so", "libubsan.so")),
        ASAN_OPTIONS="detect_leaks=0",
        D3S_TEST_SPREAD="1",
    )


@pytest.mark.parametrize("library", ["plain", slow("sanitized", shows="that the shim is clean itself")])
def test_the_shim(library: str, request: pytest.FixtureRequest) -> None:
    """The tests above rely on the shim: a missing barrier shows, and a deadlock stops with a message."""
    folder = request.getfixturevalue(library)
    done = subprocess.run([folder / "test_shim"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def runtime(name: str) -> str:
    assert CXX is not None
    return subprocess.run([CXX, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
