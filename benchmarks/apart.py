"""Ops in a process of their own, with the package of a given folder. The process takes turns in a contest.

Two versions of the package cannot be in one process, since both register the same ops. So each version has a process,
which times its own calls whenever it is asked for a turn. Benchmarks, inputs and clocks are of this checkout. This
checkout's package has such a process too: on a CPU, the same package is slower apart than in the process of the
contest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from .clock import Clock, CpuClock, Inputs, Reading, Ready

ROOT = Path(__file__).parents[1]
START = "import sys; sys.path[:0] = sys.argv[1:3]; from benchmarks.apart import serve; serve(*sys.argv[3:])"


class Apart:
    """A work: the op of one_call.py that was chosen last, with the package in `folder`."""

    def __init__(self, folder: Path, contests_of: str, device: str, short: bool) -> None:
        words = map(str, (folder, ROOT, contests_of, device, "short" * short))
        command = [sys.executable, "-c", START, *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)

    def ask(self, what: str, *given: int | str) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        with suppress(BrokenPipeError):  # if it has ended, there is no answer
            self.process.stdin.write(json.dumps([what, *given]) + "\n")
            self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError(f"its process ended with {self.process.wait()}")
        return json.loads(answer)

    def __call__(self) -> None:
        self.ask("call")

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class ClockApart:
    """A clock for contests in which each work is an `Apart`, which times itself."""

    def __init__(self) -> None:
        self.read: Reading | None = None

    def bind(self, work: Apart, inputs: Inputs) -> Apart:
        return work

    def ready(self, work: Apart) -> Ready:
        return Ready(work, *work.ask("ready"))

    def time(self, work: Apart, calls: int) -> float:
        seconds, read = work.ask("time", calls)
        self.read = read and Reading(*read)
        return seconds

    def reading(self) -> Reading | None:
        return self.read

    def peak_bytes(self, work: Apart) -> int | None:
        return work.ask("peak_bytes")

    def works(self) -> bool:
        return True  # where CUDA fails, the process of the work ends


def serve(contests_of: str, device: str, short: str) -> None:
    """Answers what an `Apart` asks, until there is nothing more to read."""
    import torch

    from . import inputs
    from .cuda_clock import CudaClock
    from .one_call import OPS
    from .sizes import sizes_for

    inputs.device = torch.device(device)
    clock: Clock = CudaClock(inputs.device) if device == "cuda" else CpuClock()
    sizes, work, ready = sizes_for(contests_of, bool(short)), None, None
    for line in sys.stdin:
        what, *given = json.loads(line)
        answer: Any = None
        if what == "op":
            work = ready = None  # before new inputs are made
            work = OPS[given[0]](sizes)
        elif what == "ready":
            ready = clock.ready(work)
            answer = ready.calls, ready.timed_by
        elif what == "time":
            answer = clock.time(ready.work, *given), clock.reading()
        elif what == "peak_bytes":
            answer = clock.peak_bytes(work)
        else:
            work()
        print(json.dumps(answer), flush=True)
