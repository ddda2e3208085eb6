#!/usr/bin/env python3
"""Random calls of every op and public function, on every back-end that runs here; `make fuzz SECONDS=…` calls it.

    python tools/fuzz.py --seconds 60              all back-ends; they share the time
    python tools/fuzz.py --seconds 600 --on cpu    one back-end, or several

Each call follows from a seed and is compared with the op's definition (tests/cases). A wrong call is
made smaller and printed as a test to paste. A call that crashes or hangs the process is reported with its seed.
Back-ends: each SIMD level of the CPU, the CUDA kernels emulated, Triton's interpreter, plain PyTorch; and on a machine
with a GPU the back-ends that run there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))  # for the table of ops
MOST = (*[40] * 28, *[400] * 3, 5000)  # limits of the lengths; a call takes one of these at random
MOST_INTERPRETED = (12,)  # Triton's interpreter takes milliseconds for each program
STUCK = 120.0  # a process is killed this many seconds after its time is over
TRIES = 400  # the number of smaller calls that are tried
MOST_PRINTED = 300  # a tensor with more elements is not written out


@dataclass
class Place:
    """A back-end and the settings of the separate process that runs its calls."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    most: tuple[int, ...] = MOST
    device: str = "cpu"


def places() -> Iterator[Place]:
    import importlib.util

    import torch

    import d3s_kernels
    from d3s_kernels._dispatch import backends

    info = d3s_kernels.build_info()
    levels = info["simd_levels"]
    for level in levels[: levels.index(info["simd"]) + 1]:
        yield Place(f"cpu-{level}", {"D3S_KERNELS_SIMD": level})
    yield Place("emulated", {"D3S_EMULATED_LIBRARY": "built when it is needed"})
    if importlib.util.find_spec("triton"):
        yield Place("triton", {"TRITON_INTERPRET": "1", "D3S_KERNELS_BACKEND": "triton"}, MOST_INTERPRETED)
    yield Place("torch", {"D3S_KERNELS_BACKEND": "torch"})
    if torch.cuda.is_available():
        for backend in backends.runnable("cuda"):
            yield Place(f"gpu-{backend}", {"D3S_KERNELS_BACKEND": backend}, (40, 40, 400, 5000, 100_000), "cuda")


# ---- one process ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of an op or a public function, with arguments that follow from a seed or from choices."""

    name: str  # "op topk_mask" or "function topk_mask"
    most: int
    seed: int = 0
    choices: tuple[int, ...] | None = None

    def row_and_function(self) -> tuple[Any, Callable[..., Any]]:
        import torch
        from cases.table import FUNCTIONS, OPS

        import d3s_kernels

        kind, name = self.name.split()
        if kind == "op":
            return OPS[name], getattr(torch.ops.d3s_kernels, name).default
        return FUNCTIONS[name], getattr(d3s_kernels, name)

    def drawn(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        from cases.draw import Draw

        draw = Draw(self.seed, most=self.most, choices=self.choices)
        return self.row_and_function()[0].draw(draw), tuple(draw.choices)

    def wrong(self, device: str) -> str | None:
        """What is wrong with the result of this call, or None."""
        import torch

        from d3s_kernels.check.compare import Comparison, compare_here

        row, function = self.row_and_function()
        try:
            arguments, _ = self.drawn()
            found = Comparison(compare_here(row, function, arguments, torch.device(device), device))
        except Exception as error:  # any error is a finding
            return f"{type(error).__name__}: {error}"
        return None if found.agrees else str(found)


def smaller(call: Call, device: str) -> Call:
    """A smaller call that is still wrong: each choice is set to 0, halved or decremented while the call stays wrong."""
    choices, left, changed = list(call.drawn()[1]), TRIES, True
    while changed and left > 0:
        changed = False
        for place in reversed(range(len(choices))):
            for value in (0, choices[place] // 2, choices[place] - 1):
                if not 0 <= value < choices[place] or left == 0:
                    continue
                left -= 1
                candidate = Call(call.name, call.most, choices=(*choices[:place], value, *choices[place + 1 :]))
                if candidate.wrong(device):
                    choices, changed = list(candidate.drawn()[1]), True
                    break
            if place >= len(choices):  # a smaller choice may lead to fewer later choices
                break
    return Call(call.name, call.most, choices=tuple(choices))


def as_test(call: Call, place: str, said: str) -> str:
    """Returns a test for tests/test_table.py, which allows what the table allows."""
    kind, name = call.name.split()
    table, function = "OPS", f"torch.ops.d3s_kernels.{name}.default"
    if kind == "function":
        table, function = "FUNCTIONS", f"d3s.{name}"
    drawn, choices = call.drawn()
    arguments = "\n".join(["dict(", *(f"        {key}={_literal(value)}," for key, value in drawn.items()), "    )"])
    if "…" in arguments:
        arguments = f"{table}[{name!r}].draw(Draw(most={call.most}, choices={list(choices)}))"
    lines = [
        f"def test_{name}() -> None:",
        f'    """On {place}:',
        *(f"    {line}" for line in said.splitlines()),
        '    """',
        f"    arguments = {arguments}",
        f"    for found in compare_here({table}[{name!r}], {function}, arguments, torch.device('cpu'), 'cpu'):",
        "        assert found.agrees, str(found)",
    ]
    return "\n".join(lines)


def _literal(value: Any) -> str:
    import torch

    from d3s_kernels import SamplingMask

    if isinstance(value, torch.Generator):
        return f"torch.Generator().manual_seed({value.initial_seed()})"
    if isinstance(value, SamplingMask):
        return f"d3s.SamplingMask({_literal(value.token_ids)}, {_literal(value.offsets)})"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    plain = value.is_contiguous() and value.storage_offset() == 0
    numbers = value.detach()
    if not plain:
        size = value.untyped_storage().nbytes() // value.element_size()
        numbers = numbers.as_strided((size,), (1,), 0)
    if numbers.numel() > MOST_PRINTED:
        return "…"
    text = re.sub(r"\b(inf|nan)\b", r"torch.\1", f"torch.tensor({numbers.tolist()}, dtype={value.dtype})")
    if plain:
        text += "" if 0 not in value.shape else f".view({tuple(value.shape)})"
    else:
        text += f".as_strided({tuple(value.shape)}, {value.stride()}, {value.storage_offset()})"
    return text + ".requires_grad_()" * value.requires_grad


def work(place: Place, seconds: float, seed: int, log: Path) -> None:
    """Makes calls until the time is over. The log has the current call, and at the end the results of all calls."""
    if "D3S_EMULATED_LIBRARY" in place.environment:
        import emulated_cuda  # noqa: F401

    from cases.table import FUNCTIONS, OPS

    names = [f"op {name}" for name, row in OPS.items() if row.served_by != "cpu" or place.device == "cpu"]
    names += [f"function {name}" for name in FUNCTIONS]
    chance, end, calls = random.Random(seed), time.monotonic() + seconds, 0
    failures: dict[str, str] = {}
    while time.monotonic() < end:
        call = Call(chance.choice(names), chance.choice(place.most), chance.getrandbits(32))
        log.write_text(json.dumps({"under way": f"{call.name}, Draw({call.seed}, most={call.most})"}))
        calls += 1
        if call.name not in failures and call.wrong(place.device):
            small = smaller(call, place.device)
            failures[call.name] = as_test(small, place.name, small.wrong(place.device) or "")
    log.write_text(json.dumps({"calls": calls, "failures": list(failures.values())}))


# ---- all of them ----------------------------------------------------------------------------------------------------


def run(place: Place, seconds: float, seed: int) -> tuple[str, int, list[str]]:
    """Runs a back-end in its own process. Returns its name, the number of calls and the failures."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **place.environment}
    if "D3S_EMULATED_LIBRARY" in environment:
        from test_cuda_emulated import build_plain

        environment["D3S_EMULATED_LIBRARY"] = str(build_plain() / "_emulated.so")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, __file__, "--seconds", str(seconds), "--seed", str(seed)]
        command += ["--work", place.name, "--log", str(log)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + STUCK)
            ended = None if done.returncode == 0 else f"ended with {done.returncode}\n{done.stderr[-2000:]}"
        except subprocess.TimeoutExpired:
            ended = "did not come back"
        found = json.loads(log.read_text()) if log.exists() else {}
    if ended:
        return place.name, found.get("calls", 0), [f"{place.name}: {found.get('under way', 'the start')}: {ended}"]
    return place.name, found["calls"], found["failures"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all back-ends together, one after the other")
    parser.add_argument("--on", nargs="+", metavar="BACKEND", help="those whose names start so; all by default")
    parser.add_argument("--seed", type=int, default=None, help="of all calls; a new one by default")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [place for place in places() if not options.on or place.name.startswith(tuple(options.on))]
    if options.work:
        work(next(place for place in chosen if place.name == options.work), options.seconds, options.seed, options.log)
        return 0
    if not chosen:
        parser.error(f"--on: got {' '.join(options.on)}; takes {', '.join(place.name for place in places())}")
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    workers = min(2, os.cpu_count() or 1, len(chosen))
    each = options.seconds * workers / len(chosen)
    wrong: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        seeds = range(seed, seed + len(chosen))  # so that each back-end draws different calls
        for name, calls, failures in pool.map(lambda place, own: run(place, each, own), chosen, seeds):
            print(f"{name:18} {calls:8} calls  {len(failures)} wrong", flush=True)
            wrong += failures
    print(f"--seed {seed} draws the same calls again", *wrong, sep="\n\n" if wrong else "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
