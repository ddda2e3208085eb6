"""Seconds and peak memory of the stages of a run."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")  # on Linux


class Costs:
    """Seconds of named stages, and each stage's peak memory, in bytes, beyond the memory in use when it began. On a GPU
    this is the memory of torch's allocator, on a CPU that of the process. None if the system does not report it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int | None] = {}

    @contextlib.contextmanager
    def of(self, stage: str) -> Iterator[None]:
        before = _start_again()
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[stage] = time.perf_counter() - began
        peak = _peak()
        self.peak[stage] = None if before is None or peak is None else peak - before


def _start_again() -> int | None:
    """Resets the peak. Returns the bytes in use."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise the peak would not show freed memory that is used again
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return None
    return _of_process("VmRSS")


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _of_process("VmHWM")


def _of_process(field: str) -> int | None:
    try:
        line = next(line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(field))
    except OSError:
        return None
    return 1024 * int(line.split()[1])
