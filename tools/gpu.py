#!/usr/bin/env python3
"""Runs everything that needs an NVIDIA GPU, in parts. Each part has a name, a time limit and a command.

    python3 tools/gpu.py a      checks every op, and measures the headlines: 250 seconds
    python3 tools/gpu.py b      all benchmarks, and where the time goes in some ops: 400 seconds
    python3 tools/gpu.py all    both: 560 seconds; `make gpu` calls it
    python3 tools/gpu.py a --only 'tests/cuda|memcheck'    only the parts whose names match this

Nothing is built or downloaded. Libraries and wheels come from build/gpu/bundle if it exists (`make gpu-bundle`);
otherwise the installed package is used. The parts of one step run at the same time, but timings run alone. A part that
exceeds its limit is interrupted, and then killed; its output so far is kept. The results are in the folder that OUT
names, or in build/gpu/out:

    gpu.log              every line of every part, as it comes
    parts.jsonl          a line for each part that has ended
    contests.jsonl       each contest of the benchmarks when it ends, and the results made from the contests
    source.csv.gz        the samples of ncu, for each instruction

At the end, the important lines of each part are printed, failed parts first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
BUNDLE = WORK / "bundle"
SITE = WORK / "site"  # TRL and the other wheels of the bundle
OUT = Path(os.environ.get("OUT") or WORK / "out")
REHEARSAL = "D3S_GPU_REHEARSAL" in os.environ  # tests the harness itself, with the CPU's library

SECONDS = {"a": 250, "b": 400, "all": 560}
GRACE = 8  # seconds from the interrupt to the kill; pytest reports its failures within 6
PRINTED, WIDTH = 11_500, 200  # characters of the summary, and of a line in it


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    command: tuple[object, ...]
    environment: dict[str, str] = field(default_factory=dict)
    tells: str = r"^(FAILED|ERROR|CRASHED) |^=+ .*(passed|failed|error).* in "  # the lines that the summary repeats
    lines: int = 14  # the maximum number of these lines


@dataclass(frozen=True)
class Ended:
    name: str
    status: str  # ok, failed, out of time or no time
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    told: tuple[str, ...] = ()


# ---- the parts -------------------------------------------------------------------------------------------------------

PYTHON = sys.executable
TESTS = (
    *(PYTHON, "-m", "pytest", "-o", "addopts=", "-q", "-rfE", "--tb=short", "--no-header", "-p", "no:cacheprovider"),
    *("--maxfail", 60, "--max-worker-restart", 50),
    *("--timeout", 90, "--timeout-method", "thread"),  # a timeout ends only one worker
)
SUITES = runpy.run_path(str(ROOT / "tests" / "cuda" / "suites.py"))["SUITES"]
FIRST_MINUTE = "tests/cuda/test_first_minute.py"
WORKERS = max(2, min(16, os.cpu_count() or 2))


def doctor(backend: str) -> Part:
    """The self-check of one back-end, in its own process: a crash of one back-end must not end the check of another."""
    chosen = {} if REHEARSAL else {"D3S_KERNELS_BACKEND": backend}
    return Part(f"self-check {backend}", 80, (PYTHON, "-m", "d3s_kernels"), chosen, r"WRONG|raised|not run|Error")


def suites(backend: str, seconds: float, workers: int, examples: int) -> Part:
    """Every test of the ops; this back-end's kernels replace the CPU's kernels."""
    chosen = {} if REHEARSAL else {"D3S_KERNELS_BACKEND": backend, "D3S_KERNELS_CHECK": "1"}
    command = (*TESTS, "-p", "on_cuda", "-n", workers, *SUITES[backend])
    return Part(f"suites {backend}", seconds, command, chosen | {"D3S_TEST_EXAMPLES": str(examples)})


def sanitizer(tool: str, share: str, seconds: float) -> Part:
    """A sanitizer on our kernels alone. Without torch's caching allocator, every tensor has its own bounds."""
    options = ("--kernel-name", "kns=d3s", "--report-api-errors", "no", "--error-exitcode", 9, "--tool", tool)
    command = ("compute-sanitizer", *options, PYTHON, "tests/cuda/sanitized.py", share)
    told = r"^=========.*(hazard|Race|Invalid|ERROR SUMMARY|RACECHECK SUMMARY|Error)|ops ran$|Error"
    return Part(f"{tool} {share}", seconds, command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, told)


def benchmarks(name: str, seconds: float, *options: object) -> Part:
    where = ("--rehearse",) if REHEARSAL else ("--device", "cuda")
    command = (PYTHON, "-m", "benchmarks", *where, "--out", OUT, "--seconds", max(10, int(seconds) - 15), *options)
    tells = r"^(FAILED|WAITS|missed|undecided|met|missing|not measured|reported)"
    return Part(name, seconds, command, tells=tells, lines=60)


def training() -> Part:
    rehearse = ("--rehearse",) if REHEARSAL else ()
    command = (PYTHON, "-W", "ignore", "-m", "benchmarks.training_run", *rehearse)
    return Part("training", 120, command, tells=r"^(same|WRONG|run)|Error", lines=20)


def steps(call: str) -> list[list[Part]]:
    """The steps, which run one after another. Each step is a list of parts that run at the same time."""
    first = [
        [
            *map(doctor, ("cuda", "triton", "torch")),
            Part("first minute", 80, (*TESTS, "-n", 3, FIRST_MINUTE)),
            Part("machine", 20, ("nvidia-smi",), tells="Driver|MiB"),
            Part("imports", 80, (PYTHON, "-c", "import trl.trainer.grpo_trainer")),  # the first import takes long
        ],
        [benchmarks("headlines", 75, "--headlines")],
    ]
    right = [
        [
            *(sanitizer(tool, share, 110) for tool in ("racecheck", "memcheck") for share in ("1/2", "2/2")),
            Part("tests/cuda", 110, (*TESTS, "-n", WORKERS // 3, "tests/cuda", "--ignore", FIRST_MINUTE)),
            suites("cuda", 110, WORKERS // 2, 20),
        ],
        [suites("triton", 80, WORKERS // 2, 5), suites("torch", 80, WORKERS // 2, 5)],
    ]
    fast = [[training()], [benchmarks("benchmarks", 300, "--resume")], *profiles()]
    return {"a": first + right, "b": fast, "all": first + right + fast}[call]


def profiles() -> list[list[Part]]:
    """Profiles the ops of benchmarks/one_call.py that D3S_GPU_PROFILE names. torch's profiler shows the time in all
    kernels and on the host; ncu shows where the time goes in each of our kernels.
    """
    ops = os.environ.get("D3S_GPU_PROFILE", "few_gradients narrow_gradient topk_mask").split()
    ours = ("--kernel-name-base", "demangled", "--kernel-name", "regex:d3s", "--profile-from-start", "off")
    ncu = ("ncu", "--clock-control", "none", "--set", "full", *ours, "--force-overwrite", "-o", WORK / "profile")
    one_call = (PYTHON, "-m", "benchmarks.one_call", *(("--device", "cpu", "--short") if REHEARSAL else ()))
    read = f"ncu --import {WORK}/profile.ncu-rep"
    both = f"{read}; {read} --page source --csv | gzip > {OUT}/source.csv.gz"
    return [
        [Part("timeline", 40, (*one_call, "--timeline", *ops), tells=r" us a call|^ +[1-9]\d*\.\d us", lines=40)],
        [Part("ncu", 120, (*ncu, *one_call, *ops), tells="Error|a call")],
        [Part("ncu, read", 40, ("sh", "-c", both), tells=r"d3s::|Duration", lines=40)],
    ]


# ---- running them ----------------------------------------------------------------------------------------------------


class Log:
    """Writes each line immediately and in one piece, so that a kill at any moment leaves only complete lines."""

    def __init__(self) -> None:
        self.start, self.lock = time.monotonic(), threading.Lock()
        self.log = (OUT / "gpu.log").open("ab", buffering=0)
        self.parts = (OUT / "parts.jsonl").open("ab", buffering=0)

    def say(self, name: str, text: str) -> None:
        at = f"[{time.monotonic() - self.start:3.0f} s] {name} | "
        with self.lock:
            self.log.write("".join(f"{at}{line}\n" for line in text.splitlines()).encode())

    def end(self, ended: Ended) -> None:
        with self.lock:
            self.parts.write((json.dumps(asdict(ended)) + "\n").encode())
        said = f"{ended.status}, {ended.seconds:.0f} s, {ended.cpu_seconds:.0f} CPU-seconds"
        print(f"[{time.monotonic() - self.start:3.0f} s] {ended.name}: {said}", flush=True)


def environment() -> dict[str, str]:
    path = [ROOT, SITE, ROOT / "tests", ROOT / "tests" / "cuda", os.environ.get("PYTHONPATH")]
    commit, before, caches = BUNDLE / "commit", BUNDLE / "before", WORK / "caches"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "D3S_TEST_CACHES": str(caches),  # all parts share one folder of compiled kernels
        "TRITON_CACHE_DIR": str(caches / "triton_cache_dir"),
        "D3S_TEST_SPREAD": "1",  # a free worker takes the next test
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise every worker starts a pool of compilers
        **({"D3S_COMMIT": commit.read_text().strip()} if commit.exists() else {}),
        **({"D3S_BEFORE": str(before)} if before.exists() else {}),
    }


def unpack() -> None:
    """Copies the bundle's libraries into the package, and installs the bundle's wheels."""
    for library in (BUNDLE / "libraries").glob("d3s_kernels/*.so"):
        shutil.copy2(library, ROOT / "d3s_kernels")
    if wheels := sorted(BUNDLE.glob("wheels/*.whl")):
        pip = (PYTHON, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade")
        subprocess.run([*pip, "--target", str(SITE), *map(str, wheels)], check=True, timeout=60)


def exited(process: subprocess.Popen[str], seconds: float) -> bool:
    """Waits at most this many seconds for the process to end. Returns whether it has ended. Does not reap the
    process.
    """
    end = time.monotonic() + seconds
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


RUNNING: set[int] = set()  # process groups, which end with this program


def run(part: Part, end: float, log: Log) -> Ended:
    left = min(part.seconds, end - time.monotonic() - GRACE)
    command = [str(word) for word in part.command]
    if left < 4:
        return Ended(part.name, "no time")
    if not shutil.which(command[0]):
        return Ended(part.name, "failed", told=(f"there is no {command[0]}",))
    log.say(part.name, f"$ {' '.join(command)}")
    start, said = time.monotonic(), list[str]()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | part.environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    RUNNING.add(process.pid)

    def pump() -> None:
        for line in process.stdout or ():
            said.append(line.rstrip())
            log.say(part.name, said[-1])

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    in_time = exited(process, left)
    if not in_time:
        log.say(part.name, f"! out of time after {left:.0f} s")
        os.kill(process.pid, signal.SIGINT)
        exited(process, GRACE)
    RUNNING.discard(process.pid)
    os.killpg(process.pid, signal.SIGKILL)  # the process, and its children that still run
    reader.join(5)
    _, status, used = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    told = list(dict.fromkeys(line[:WIDTH] for line in said if re.search(part.tells, line)))
    if code and not told:
        told = [line[:WIDTH] for line in said[-3:]]
    if len(told) > part.lines:
        told[part.lines :] = [f"   and {len(told) - part.lines} more lines in gpu.log"]
    outcome = "out of time" if not in_time else "ok" if code == 0 else "failed"
    seconds, cpu = time.monotonic() - start, used.ru_utime + used.ru_stime
    return Ended(part.name, outcome, round(seconds, 1), round(cpu, 1), tuple(told))


def summary(ended: list[Ended]) -> str:
    """The important lines of each part, failed parts first, in at most PRINTED characters."""
    worst_first = sorted(ended, key=lambda part: ("failed", "out of time", "no time", "ok").index(part.status))
    said = [(f"== {part.name}: {part.status}, {part.seconds:.0f} s", *part.told) for part in worst_first]
    return "\n".join(line for lines in said for line in lines)[:PRINTED]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=SECONDS)
    parser.add_argument("--seconds", type=float, help="for all parts together")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="the parts whose names it is found in")
    given = parser.parse_args()
    end = time.monotonic() + (given.seconds or SECONDS[given.call])
    for folder in (OUT, WORK / "caches"):
        folder.mkdir(parents=True, exist_ok=True)
    log, ended = Log(), list[Ended]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def take(part: Part) -> None:
        ended.append(run(part, end, log))
        log.end(ended[-1])

    cuda = [Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*"))]
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, cuda)])
    try:
        unpack()
        for step in steps(given.call):
            chosen = [part for part in step if re.search(given.only, part.name)]
            threads = [threading.Thread(target=take, args=[part], daemon=True) for part in chosen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        for group in RUNNING:
            os.killpg(group, signal.SIGKILL)
        log.say("summary", text := summary(ended))
        print(text, flush=True)
    return int(any(part.status == "failed" for part in ended))


if __name__ == "__main__":
    sys.exit(main())
