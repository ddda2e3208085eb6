"""The machine and the versions of a run."""

import os
import platform
import re
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import d3s_kernels as d3s


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
        "commit": commit(),
        "build_info": d3s.build_info(),
    } | (gpu() if device == "cuda" else {})


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
        "liger": installed("liger-kernel"),
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
    """What D3S_COMMIT says; else git's commit, with `+` if tracked files have changed since. None without either."""
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
