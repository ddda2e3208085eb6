"""Measures the peak memory of some work, beyond the memory that was allocated before the work.

Each contender runs in a separate process, because a process's peak can only rise. The contender runs once before the
measurement, on smaller inputs or completely. So thread pools and libraries are not counted.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import inputs
from .sizes import FULL, SHORT, Sizes
from .targets import ALL_TOKENS, GRPO, RECORDED, SMALL_MODEL
from .timing import Contenders
from .withdrawn import FULL_COMPLETIONS

Work = Callable[[], Any]
FORWARD, STEP = "logprob_entropy forward, peak memory beyond the logits", "TRL's update, peak memory beyond its model"
MICRO_BATCHES = "TRL's update in 8 micro-batches, nothing dropped, peak memory beyond its model"


def forward(function: Callable, sizes: Sizes) -> Work:
    """A forward pass. The logits are made in place, so that making them does not raise the peak."""
    logits, labels = inputs.logits_and_labels(sizes)
    tiny = torch.zeros(sizes.sequences, sizes.tokens, 512, dtype=logits.dtype)
    with torch.no_grad():
        function(tiny, labels % 512)
    return torch.no_grad()(lambda: function(logits, labels))


def ours(sizes: Sizes) -> Work:
    import d3s_kernels as d3s

    return forward(d3s.logprob_entropy, sizes)


def trl(sizes: Sizes) -> Work:
    from .peers import trl_grpo

    return forward(trl_grpo, sizes)


def plain(sizes: Sizes) -> Work:
    from .peers import plain

    return forward(plain, sizes)


def step(name: str) -> Callable[[Sizes], Work]:
    def prepared(sizes: Sizes) -> Work:
        from .trl_step import Update

        work = Update(name, sizes, SMALL_MODEL, FULL_COMPLETIONS)
        work()
        return work

    return prepared


def micro_batches(name: str) -> Callable[[Sizes], Work]:
    def prepared(sizes: Sizes) -> Work:
        from .trl_step import Step, shape_and_sizes

        few, work = (
            Step(name, scaled, shape, RECORDED) for shape, scaled in (shape_and_sizes(n, sizes) for n in (2, 8))
        )
        few()
        return work

    return prepared


CONTESTS: dict[str, dict[str, Callable[[Sizes], Work]]] = {
    FORWARD: {"d3s_kernels": ours, "TRL": trl, "PyTorch": plain},
    STEP: {"d3s_kernels": step("d3s_kernels"), GRPO: step(GRPO)},
    MICRO_BATCHES: {"d3s_kernels": micro_batches(ALL_TOKENS), GRPO: micro_batches(GRPO)},
}


def measure(contest: str, short: bool) -> dict[str, int]:
    """The peak bytes of each contender; empty if the system does not report a process's peak (Linux does)."""
    if high_water() is None:
        return {}
    return {name: in_own_process(contest, name, short) for name in CONTESTS[contest]}


def allowed(sizes: Sizes) -> int:
    """The bytes that a forward pass may allocate beyond its logits: one float32 row of the vocabulary per thread."""
    return 4 * sizes.vocabulary * torch.get_num_threads()


def of_contest(contenders: Contenders) -> dict[str, int]:
    """The peak bytes of each contender on a GPU. There, torch's allocator reports the peak of each call."""
    return {
        name: timing.peak_bytes
        for name, timing in contenders.items()
        if timing.role != "yardstick" and timing.peak_bytes is not None
    }


def in_own_process(contest: str, name: str, short: bool) -> int:
    command = [sys.executable, "-m", __name__, contest, name, *(["--short"] if short else [])]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def growth(work: Work) -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = high_water()
    work()
    return high_water() - before


def high_water() -> int | None:
    """The peak of this process in bytes; None if unknown. `ru_maxrss` would include the parent process's peak."""
    try:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    except (OSError, TypeError):
        return None


if __name__ == "__main__":
    print(growth(CONTESTS[sys.argv[1]][sys.argv[2]](SHORT if "--short" in sys.argv else FULL)))
