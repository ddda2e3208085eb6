"""The machine and the versions of a run."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import d3s_kernels as d3s

PEERS = ("liger-kernel", "unsloth_zoo", "quack-kernels", "flashinfer-python")  # peers besides TRL; often not installed


def describe(device: str) -> dict[str, Any]:
    return {
        "machine": word(gpu()["gpu"] if device == "cuda" else f"{cpu_model()} {os.cpu_count()} cores"),
        "device": device,
        "date": date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {package: installed(package) for package in ("torch", "trl", "transformers")}
        | {"d3s_kernels": d3s.__version__},
        "peers": {package: installed(package) for package in PEERS},
        "commit": commit(),
        "build_info": d3s.build_info(),
    } | (gpu() if device == "cuda" else {})


@dataclass(frozen=True)
class Threads:
    """The number of threads on which all contenders run: one, or torch's default, whichever is faster.

    A host may take a virtual core away for a moment. The threads on all other cores then wait at the next barrier, so
    one thread can be faster.
    """

    seconds: dict[int, float]  # the time of a short product, by the number of threads

    @property
    def chosen(self) -> int:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def said(self) -> str:
        told = " and ".join(f"{1e3 * took:.3g} ms on {count}" for count, took in self.seconds.items())
        return f"All contenders ran on {threads(self.chosen)}: a short product took {told}."

    def data(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "chosen": self.chosen, "said": self.said}


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def try_threads() -> Threads:
    """Times a short product with one thread and with torch's default, in turns. The medians are compared, since the
    fastest calls do not show how often a core is missing.
    """
    most = torch.get_num_threads()
    matrix = torch.rand(1_024, 1_024)
    times: dict[int, list[float]] = {count: [] for count in (1, most)}
    for _ in range(31):
        for count, of_count in times.items():
            torch.set_num_threads(count)
            start = perf_counter()
            torch.mm(matrix, matrix)
            of_count.append(perf_counter() - start)
    torch.set_num_threads(most)
    return Threads({count: median(of_count[1:]) for count, of_count in times.items()})


def word(name: str) -> str:
    """The name in a form for file names: `amd-epyc-2-cores`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def gpu() -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(torch.device("cuda"))
    return {
        "gpu": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "cache_bytes": facts.L2_cache_size,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "triton": installed("triton"),
    }


def driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The value of D3S_COMMIT if it is set; else git's commit, with `+` if tracked files have changed since this
    commit. None if there is neither.
    """
    if told := os.environ.get("D3S_COMMIT"):
        return told

    def git(*words: str) -> str | None:
        here = Path(__file__).parent
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no") else head
