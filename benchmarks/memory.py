"""How much memory the forward pass takes on top of its logits, at its peak.

Each contender runs in a process of its own, since a peak can only rise. The logits are filled in place, and the
contender has answered for a tiny vocabulary before: what is counted is the work alone, no thread pools, no libraries.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from . import inputs
from .sizes import FULL, SHORT, Sizes
from .timing import Contenders


def ours() -> Callable:
    import d3s_kernels as d3s

    return d3s.logprob_entropy


def trl() -> Callable:
    from .peers import trl_grpo

    return trl_grpo


def plain() -> Callable:
    from .peers import plain

    return plain


CONTENDERS = {"d3s_kernels": ours, "TRL": trl, "PyTorch": plain}


def measure(short: bool) -> dict[str, int]:
    """Bytes by contender; empty where the system does not tell (it does on Linux)."""
    if high_water() is None:
        return {}
    return {name: in_own_process(name, short) for name in CONTENDERS}


def allowed(sizes: Sizes) -> int:
    """Beside its logits the forward pass may hold one float32 row per thread, and nothing else that grows with V."""
    return 4 * sizes.vocabulary * torch.get_num_threads()


def of_contest(contenders: Contenders) -> dict[str, int]:
    """On a GPU torch's allocator tells, call by call."""
    return {
        name: timing.peak_bytes
        for name, timing in contenders.items()
        if timing.role != "yardstick" and timing.peak_bytes is not None
    }


def in_own_process(name: str, short: bool) -> int:
    command = [sys.executable, "-m", __name__, name, *(["--short"] if short else [])]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def growth(function: Callable, sizes: Sizes) -> int:
    logits, labels = inputs.logits_and_labels(sizes)
    tiny = torch.zeros(sizes.sequences, sizes.tokens, 512, dtype=logits.dtype)
    with torch.no_grad():
        function(tiny, labels % 512)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
        before = high_water()
        function(logits, labels)
        return high_water() - before


def high_water() -> int | None:
    """Bytes. Not `ru_maxrss`, which a process takes over from the one that started it."""
    try:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    except (OSError, TypeError):
        return None


if __name__ == "__main__":
    print(growth(CONTENDERS[sys.argv[1]](), SHORT if "--short" in sys.argv else FULL))
