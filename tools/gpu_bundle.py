#!/usr/bin/env python3
"""Makes the bundle for a GPU machine that is lent for minutes, and rehearses those minutes without a GPU.

    python3 tools/gpu_bundle.py                builds and downloads the bundle, into build/gpu/bundle
    python3 tools/gpu_bundle.py before COMMIT  adds the package of an earlier commit, to be timed beside this one
    python3 tools/gpu_bundle.py rehearse       runs tools/gpu.py from the bundle, on the CPU, in 420 seconds or as given

Both run in an environment like the GPU machine's environment: Python 3.12, torch 2.11.0 for CUDA 13 (`make gpu-bundle`
and `make gpu-rehearsal` create it in build/gpu/env). The rehearsal fails if the harness has an error in some part, if a
copy of the results that is taken during the run cannot be read, or if a part would exceed its limit on the GPU machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
BUNDLE = WORK / "bundle"
TREE = WORK / "rehearsal" / "d3s_kernels"  # the checkout as on the GPU machine
STAND_INS = WORK / "rehearsal" / "bin"
OUT = WORK / "rehearsal" / "out"

ARCHITECTURE = "90-real"
# The peers of the benchmarks, and their dependencies that the GPU machine lacks. Only the Triton kernels of verl are
# imported, and these kernels need none of verl's dependencies.
WHEELS = (
    *("trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19"),
    *("liger-kernel==0.8.5", "verl==0.9.1"),
)
MOST_BYTES = 64 << 20  # of the checkout and the bundle together
FILES_BACK = 6
CORES = 12  # many parallel processes get only this many of the GPU machine's 16 cores
SNAPSHOTS = (30, 60, 120)  # seconds after which the results are read, as if the run had been killed
FAULTS = (
    r"ImportError|ModuleNotFoundError|FileNotFoundError|No such file|unrecognized arguments|errors during collection"
    r"|INTERNALERROR|UsageError|no tests ran|found no collectors|Traceback"
)


def call(*command: object, **options: Any) -> None:
    subprocess.run([str(word) for word in command], check=True, **{"cwd": ROOT, **options})


def output(*command: object, cwd: Path = ROOT) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, cwd=cwd, stdout=subprocess.PIPE, text=True).stdout.strip()


def travelling() -> list[Path]:
    """The files of the checkout that are copied to the GPU machine: all that git does not ignore."""
    names = output("git", "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    return [ROOT / name for name in sorted(names) if name and (ROOT / name).is_file()]


# ---- the bundle ------------------------------------------------------------------------------------------------------


def build(source: Path, made: Path, prefix: Path) -> None:
    """Compiles the libraries of this source for the GPU and the CPU, and installs them under `prefix`."""
    tools = Path(sys.executable).parent
    cmake, pybind11 = tools / "cmake", output(sys.executable, "-m", "pybind11", "--cmakedir")
    call(
        *(cmake, "-S", source, "-B", made, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DD3S_CUDA=ON"),
        *(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DCMAKE_CUDA_ARCHITECTURES={ARCHITECTURE}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"),
        stdout=subprocess.DEVNULL,
    )
    call(cmake, "--build", made, stdout=subprocess.DEVNULL)
    shutil.rmtree(prefix, ignore_errors=True)
    call(cmake, "--install", made, "--prefix", prefix, "--strip", stdout=subprocess.DEVNULL)


def bundle() -> None:
    shutil.rmtree(BUNDLE / "before", ignore_errors=True)
    build(ROOT, WORK / "cmake", BUNDLE / "libraries")
    wheels = BUNDLE / "wheels"
    there = {"-".join(path.name.split("-")[:2]) for path in wheels.glob("*.whl")}
    if there != {name.replace("-", "_").replace("==", "-") for name in WHEELS}:
        shutil.rmtree(wheels, ignore_errors=True)  # two versions of a wheel would stop the installation
        call(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels, *WHEELS)
    changed = "-changed" if output("git", "status", "--porcelain") else ""
    (BUNDLE / "commit").write_text(output("git", "rev-parse", "--short", "HEAD") + changed + "\n")
    lay_out()
    loads = (
        "import sys; sys.path.insert(0, 'tools'); import gpu; gpu.unpack(); from d3s_kernels._dispatch import libraries"
    )
    call(sys.executable, "-c", f"{loads}; assert not libraries.why_not_cuda(), libraries.why_not_cuda()", cwd=TREE)
    say_size()


def before(commit: str) -> None:
    """Puts the package of an earlier commit into the bundle. benchmarks/bench_before.py times it."""
    archive, source, there = (WORK / "before" / name for name in ("source.tar", "source", "package"))
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    call("git", "archive", "-o", archive, commit)
    shutil.unpack_archive(archive, source)
    build(source, WORK / "before" / "cmake", there)
    shutil.copytree(source / "d3s_kernels", there / "d3s_kernels", dirs_exist_ok=True)
    (there / "commit").write_text(output("git", "rev-parse", "--short", commit) + "\n")
    there.replace(BUNDLE / "before")
    say_size()


def say_size() -> None:
    tree = sum(path.stat().st_size for path in travelling())
    parts = {path: path.stat().st_size for path in sorted(BUNDLE.rglob("*")) if path.is_file()}
    for path, size in parts.items():
        if size > 50_000:
            print(f"{size:>12,}  {path.relative_to(ROOT)}")
    everything = tree + sum(parts.values())
    print(f"{tree:>12,}  the checkout\n{everything:>12,}  in all; at most {MOST_BYTES:,}")
    assert everything <= MOST_BYTES, "the bundle is too large"
    print("\nCarry build/gpu/bundle beside the checkout, and run there:")
    for letter, seconds in (("a", 250), ("b", 400)):
        print(f"  python3 tools/gpu.py {letter} --seconds {seconds}")


# ---- the rehearsal ---------------------------------------------------------------------------------------------------


def lay_out() -> None:
    """Copies the checkout and its bundle into TREE, laid out as on the GPU machine."""
    shutil.rmtree(TREE, ignore_errors=True)
    for path in travelling():
        to = TREE / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    shutil.copytree(BUNDLE, TREE / BUNDLE.relative_to(ROOT))


def stand_ins() -> None:
    """Writes stand-ins for programs of the GPU machine. They print their names, and run the program that follows."""
    shutil.rmtree(STAND_INS, ignore_errors=True)
    STAND_INS.mkdir(parents=True)
    run_the_rest = 'while [ $# -gt 0 ]; do case $1 in *python*) exec "$@";; *) shift;; esac; done'
    programs = {
        "nvidia-smi": "echo 'a stand-in, 0.0, 81559 MiB'",
        "compute-sanitizer": f"echo '========= COMPUTE-SANITIZER, a stand-in'; {run_the_rest}",
        "ncu": f"echo '==PROF== a stand-in'; {run_the_rest}",
    }
    for name, does in programs.items():
        path = STAND_INS / name
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)


def rehearse(seconds: float) -> int:
    lay_out()
    for library in TREE.rglob("_cuda.so"):
        library.unlink()  # the CPU's library takes its place
    stand_ins()
    shutil.rmtree(OUT, ignore_errors=True)
    there = {
        **os.environ,
        "PATH": f"{STAND_INS}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(OUT),
        "D3S_GPU_REHEARSAL": "1",
        "D3S_TEST_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "tools/gpu.py", "all", "--seconds", str(seconds)]
    start = time.monotonic()
    wrong: list[str] = []
    with subprocess.Popen(command, cwd=TREE, env=there) as process:
        for moment in SNAPSHOTS:
            while process.poll() is None and time.monotonic() < start + moment:
                time.sleep(0.2)
            wrong += [f"after {moment} s: {problem}" for problem in unreadable(OUT)]
    wrong += [f"at the end: {problem}" for problem in unreadable(OUT)]
    wrong += list(faults_of_the_harness())
    print(*(f"WRONG {line}" for line in wrong), sep="\n")
    print(f"{time.monotonic() - start:.0f} s, {len(wrong)} faults of the harness")
    return int(bool(wrong))


def unreadable(folder: Path) -> Iterator[str]:
    """Names what is incomplete in a folder of results."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if len(files) > FILES_BACK:
        yield f"{len(files)} files; at most {FILES_BACK} come back"
    for path in (path for path in files if path.suffix != ".gz"):
        text = path.read_text()
        if text and not text.endswith("\n"):
            yield f"{path.name}: its last line is cut"
        try:
            if path.suffix == ".jsonl":
                _ = [json.loads(line) for line in text.splitlines()]
            elif path.suffix == ".json":
                json.loads(text)
        except ValueError as problem:
            yield f"{path.name}: {problem}"


def faults_of_the_harness() -> Iterator[str]:
    ended = [json.loads(line) for line in (OUT / "parts.jsonl").read_text().splitlines()]
    limits = limits_of_parts()
    print(f"\n{'part':24}{'status':12}{'seconds':>8}{'CPU':>6}{'there':>7}{'limit':>7}")
    for part in ended:
        there, limit = part["cpu_seconds"] / CORES, limits[part["name"]]
        row = f"{part['seconds']:8.0f}{part['cpu_seconds']:6.0f}{there:7.1f}{limit:7.0f}"
        print(f"{part['name']:24}{part['status']:12}{row}")
        if part["status"] == "failed":
            yield f"{part['name']} failed: {' | '.join(part['told'][:3])}"
        if there > limit:
            yield f"{part['name']}: {part['cpu_seconds']} CPU-seconds do not fit into {limit} s on {CORES} cores"
    for line in (OUT / "gpu.log").read_text().splitlines():
        if re.search(FAULTS, line):
            yield line[:200]
    if missing := limits.keys() - {part["name"] for part in ended}:
        yield f"no result of {', '.join(sorted(missing))}"


def limits_of_parts() -> dict[str, float]:
    sys.path.insert(0, str(TREE / "tools"))
    import gpu

    return {part.name: part.seconds for step in gpu.steps("all") for part in step}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rehearse"]:
        sys.exit(rehearse(float(sys.argv[2]) if sys.argv[2:] else 420.0))
    elif sys.argv[1:2] == ["before"]:
        before(sys.argv[2])
    else:
        bundle()
