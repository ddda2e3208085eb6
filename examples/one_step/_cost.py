"""Measures the cost of a piece of code: seconds, and the memory beyond what was in use before."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_STATUS = Path("/proc/self/status")


class Costs:
    """Seconds and peak extra bytes of named stages. A stage can be entered several times; its seconds are added up.

    Memory is measured on the process's resident set: its peak minus its size when the stage was first entered. This
    includes what a forward stores for its backward, and the internal buffers of libraries.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self._resident_before: dict[str, int] = {}

    @contextlib.contextmanager
    def of(self, stage: str) -> Iterator[None]:
        _return_freed_memory()
        before = self._resident_before.setdefault(stage, _resident("VmRSS"))
        with _peak_resident() as peak:
            begin = time.perf_counter()
            yield
            seconds = time.perf_counter() - begin
            highest = peak()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.peak_bytes[stage] = max(self.peak_bytes.get(stage, 0), highest - before)

    @classmethod
    def of_runs(cls, runs: list[Costs]) -> Costs:
        """Combines repeated runs of the same work: the shortest (least disturbed) time and the largest memory."""
        result = cls()
        for stage in runs[0].seconds:
            result.seconds[stage] = min(run.seconds[stage] for run in runs)
            result.peak_bytes[stage] = max(run.peak_bytes[stage] for run in runs)
        return result


def _resident(field: str) -> int:
    """Bytes of the resident set: VmRSS is its current size, VmHWM its peak."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    except FileNotFoundError:
        raise SystemExit("This reads memory use from /proc, so it needs Linux (or WSL).") from None
    return int(line.split()[1]) * 1024


def _return_freed_memory() -> None:
    """Returns free heap pages to the system: if code reused them, the memory that it needs would not be seen."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextlib.contextmanager
def _peak_resident() -> Iterator[Callable[[], int]]:
    """Measures the peak of the code inside: the kernel's own peak, or sampled if that one cannot be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        yield from _sampled_peak()
    else:
        yield lambda: _resident("VmHWM")


def _sampled_peak() -> Iterator[Callable[[], int]]:
    highest, done = _resident("VmRSS"), threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, _resident("VmRSS"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(highest, _resident("VmRSS"))
    finally:
        done.set()
        thread.join()
