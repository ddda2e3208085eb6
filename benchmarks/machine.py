"""Where and with what a run was made."""

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


def describe() -> dict[str, Any]:
    return {
        "machine": name(),
        "date": date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {package: installed(package) for package in ("torch", "trl", "transformers", "d3s_kernels")},
        "commit": commit(),
        "build_info": d3s.build_info(),
    }


def name() -> str:
    """A word for files: `amd-epyc-2-cores`"""
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_model()} {os.cpu_count()} cores".lower()).strip("-")


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
    """The commit that was measured; `+` if files were changed since. None outside a git checkout."""

    def git(*words: str) -> str | None:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no") else head
