"""Measure everything, print one table, and keep the result.

    python -m benchmarks                 everything: the full sizes, about 40 minutes, files in benchmarks/results/
    python -m benchmarks --short         checks that every benchmark runs, on small inputs; writes nothing
    python -m benchmarks --only topk     some benchmarks (pytest's -k); writes nothing
    python -m benchmarks --device cuda   everything on a GPU, with its own sizes and targets; about three minutes
    python -m benchmarks --rehearse      checks that each of a GPU's contests runs, on the CPU and on small inputs
    python -m benchmarks --from FILE...  measures nothing: makes the page from these logs

When a contest ends, its times are written to the file contests.jsonl. For a whole run on a CPU, this file is in
.benchmarks/; on a GPU, the file is in the folder of the results. Even after an interrupted run, `--from` makes the page
from this file, and `--resume` runs the remaining contests. On a GPU the most important contests come first, and
`--headlines` runs only these. With `--seconds`, no contest starts after this number of seconds.

If a run on a CPU was disturbed, its title says so (quiet.py). A missed target is not an error, but a failed benchmark
is an error.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from rich.console import Console

import d3s_kernels as d3s

from . import machine, memory, page, quiet, report, timing
from .computed import is_source, with_computed
from .harness import POISONED, describe
from .judging import RULES
from .sizes import rollouts, sizes_for
from .targets import (
    AVX2_ENVIRONMENT,
    NOTHING,
    RECORDED,
    SMALL_VOCABULARY,
    STEP_MEMORY,
    TARGETS,
    UNSLOTH_ENVIRONMENT,
    above_avx2,
    in_micro_batches,
    targets_of,
)
from .timing import Contenders, Log
from .withdrawn import FULL_UPDATE

HERE = Path(__file__).parent
# With this variable, torch asks the system for pages of 2 MiB. With pages of 4 KiB, getting fresh memory takes longer
# than using it.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "UNSLOTH_COMPILE_LOCATION")  # folders of generated code
MOST_PROCESSES = 6  # in a run on a GPU; a new process starts if CUDA no longer works in the last one
GRACE = 3.0  # seconds that an interrupted process has to end by itself


def main() -> int:
    options = arguments()
    on_gpu, rule = options.device == "cuda", RULES[options.device]
    console = Console(width=None if sys.stdout.isatty() else 180)
    if on_gpu and not (options.rehearse or options.logs or torch.cuda.is_available()):
        console.print("[bold red]There is no CUDA device here.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        if options.logs:
            log, failed = timing.read(*options.logs), False
            use_threads(log)
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores SIGINT
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            file = log_file(options, Path(folder))
            if not on_gpu:
                if "threads_tried" not in timing.read(file).facts:  # a resumed run keeps its choice
                    timing.append(file, {"facts": {"threads_tried": machine.try_threads().data()}})
                use_threads(timing.read(file))
            log, failed = measure(options, file)
    if not log.contests:
        console.print("[bold red]Nothing was measured.")
        return 1
    facts = log.facts
    if not on_gpu and facts["load_before"] > 0.5:
        console.print(f"[yellow]This machine was busy (load {facts['load_before']:.1f}): timings do not mean much.")
    whole = on_gpu or (not options.short and not options.only)
    gpu = facts.get("gpu", "")
    targets = targets_of(options.device, facts["build_info"], gpu)
    contests = log.contests if options.short else with_computed(log.contests)  # a rehearsal has one small model
    judged = report.lines(contests, targets, rule, short=options.short, whole=whole, gpu=gpu)
    sizes = sizes_for(options.device, options.short)
    peaks = peak_memory(options, log.contests)
    logits = describe(sizes.sequences, sizes.tokens, sizes.vocabulary, dtype=torch.bfloat16)
    allowed = None if on_gpu else memory.allowed(sizes)
    vocabulary = sizes.vocabulary if on_gpu else SMALL_VOCABULARY
    judged += report.memory_line(memory.FORWARD, logits, peaks[memory.FORWARD], short=options.short, allowed=allowed)
    judged += report.memory_line(
        memory.STEP, rollouts(sizes, vocabulary), peaks[memory.STEP], short=options.short, share=STEP_MEMORY
    )
    size = rollouts(replace(sizes, rollouts=64), sizes.vocabulary)
    judged += report.memory_line(memory.MICRO_BATCHES, size, peaks[memory.MICRO_BATCHES], short=options.short)

    seen = quiet_of(log)
    facts |= {"failed": log.failed, "missing_peers": {name: why for name, why in log.missing.items() if why}}
    facts |= {"quiet": seen and seen.data(), "small_inputs": options.short, "sources": sources_of(log.contests)}
    run = facts | report.data(judged, contests, rule, gpu) | {"peak_extra_bytes": peaks}
    heading, caption = page.heading(run), page.circumstances(run)
    if on_gpu:
        print(report.compact(f"{heading}; {caption}", judged, log), flush=True)
    else:
        console.print(report.table(heading, caption, judged))
    if failed:
        console.print("[bold red]A benchmark failed; see above.")
        if whole and not on_gpu:
            console.print(f"Nothing is written. What there is: python -m benchmarks --from {file}")
    # A GPU is available only for minutes, so its results are kept even if some benchmarks failed.
    if on_gpu or (whole and not failed):
        console.print(f"Written to {write(options.out, run)}.{{json,md}}")
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small inputs, under two minutes; writes nothing")
    parser.add_argument("--only", metavar="EXPRESSION", help="some benchmarks (pytest's -k); on a CPU writes nothing")
    parser.add_argument("--device", choices=list(TARGETS), default="cpu", help="where the inputs are")
    parser.add_argument("--rehearse", action="store_true", help="a GPU's contests, on the CPU and on small inputs")
    parser.add_argument("--headlines", action="store_true", help="the first contests of a GPU alone")
    parser.add_argument("--resume", action="store_true", help="not what has ended in contests.jsonl")
    parser.add_argument("--from", dest="logs", nargs="+", metavar="FILE", type=Path, help="logs; nothing is measured")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where results are written")
    parser.add_argument("--seconds", type=float, help="start no benchmark after so long")
    options = parser.parse_args()
    if options.rehearse or (options.logs and timing.read(*options.logs).facts.get("device") == "cuda"):
        options.device = "cuda"
    options.short |= options.rehearse
    if options.rehearse and not options.out:
        options.out = Path(tempfile.gettempdir()) / "d3s-rehearsal"
    options.out = options.out or HERE / "results"
    return options


def log_file(options: argparse.Namespace, folder: Path) -> Path:
    """The file to which the times of a contest are written when it ends. After a whole run, the file is kept, so that a
    later call can resume the run.
    """
    if options.device == "cpu" and (options.short or options.only):
        return folder / "contests.jsonl"
    file = (options.out if options.device == "cuda" else HERE.parent / ".benchmarks") / "contests.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu" and not options.resume:
        file.unlink(missing_ok=True)
    day = timing.read(file).facts.get("date")
    if day not in (None, date.today().isoformat()):
        file.rename(file.with_name(f"contests-{day}.jsonl"))
    return file


def use_threads(log: Log) -> None:
    """Sets the number of threads for all contenders, in this process and in the processes that it starts."""
    if tried := log.facts.get("threads_tried"):
        torch.set_num_threads(tried["chosen"])
        os.environ["OMP_NUM_THREADS"] = str(tried["chosen"])


def measure(options: argparse.Namespace, file: Path) -> tuple[Log, bool]:
    """Runs all contests. Returns the log, and whether any contest failed. On a CPU, some contests run in a process of
    their own.
    """
    ended = timing.read(file).ended
    done = [test for test, how in ended.items() if how != "failed"] if options.resume else []
    codes = {run_pytest(options, HERE, {}, file, done)}
    for where, environment in apart(options):
        codes |= {run_pytest(options, HERE / where, environment, file, done)}
    none_chosen = int(pytest.ExitCode.NO_TESTS_COLLECTED)  # --only may leave one process without a test
    log = timing.read(file)
    return log, bool(codes - {0, none_chosen}) or not log.contests


def apart(options: argparse.Namespace) -> list[tuple[str, dict[str, str]]]:
    """The files that run in processes of their own, each with the environment of its process. One file uses only AVX2,
    and runs if the CPU has better instructions. The other file is for Unsloth.
    """
    if options.device != "cpu":
        return []
    files = []
    if above_avx2(d3s.build_info()) and not options.short:
        files.append(("bench_avx2.py", AVX2_ENVIRONMENT))
    if find_spec("unsloth_zoo"):
        files.append(("bench_unsloth.py", UNSLOTH_ENVIRONMENT))
    return files


def run_pytest(
    options: argparse.Namespace, where: Path, environment: dict[str, str], file: Path, done: list[str]
) -> int:
    """Runs contests with pytest, whose output shows the progress, and returns its exit status.

    CUDA may stop working during a contest. Then the process of pytest ends, and a new process runs the remaining
    contests. If a peer ran when CUDA stopped working, the new process also repeats this contest, and leaves out that
    peer in all contests.
    """
    command = [sys.executable, "-m", "pytest", str(where), "--no-header", "--benchmark-quiet"]
    command += [f"--device={options.device}", f"--log={file}"]
    command += ["-q", "-s", "--tb=short", "--no-summary"] if options.device == "cuda" else ["-v"]
    command += [f"--{name}" for name in ("short", "rehearse", "headlines") if getattr(options, name)]
    command += ["-k", options.only] if options.only else []
    before, start = timing.read(file), monotonic()
    done = list(done)
    for _ in range(MOST_PROCESSES if options.device == "cuda" else 1):
        left = [f"--seconds={max(1, options.seconds - (monotonic() - start))}"] if options.seconds else []
        with tempfile.TemporaryDirectory() as folder:
            # In a shared cache, torch.compile could find code that was compiled for other instructions. Such code would
            # crash.
            caches = dict.fromkeys(CACHES, f"{folder}/compiled") | LARGE_PAGES | environment
            child = subprocess.Popen(
                command + left + [f"--done={test}" for test in done], cwd=HERE.parent, env=os.environ | caches
            )
            code = ended(child)
        if code != POISONED and not (code < 0 and options.device == "cuda" and code not in STOPPED):
            return code
        log = timing.read(file)
        done += log.began[len(before.began) :]
        culprits = [name for _, name in log.poisoned[len(before.poisoned) :] if name != report.OURS]
        if culprits:
            done = [test for test in done if test != log.began[-1]]
            command += [f"--exclude={name}" for name in culprits]
        before = log
    return code


STOPPED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL}


def ended(child: subprocess.Popen[bytes]) -> int:
    """Waits until the child ends, and returns its exit status. If this process is interrupted, it also interrupts the
    child, and kills the child if it has not ended after GRACE seconds.
    """
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return -signal.SIGINT


def peak_memory(options: argparse.Namespace, contests: dict[str, Contenders]) -> dict[str, dict[str, int]]:
    """The peak memory in bytes, by contest and contender. On a GPU, the contests have measured the peaks already. On a
    CPU, the peaks are measured here, each contender in a process of its own.
    """
    if options.device == "cuda":
        held = {
            memory.FORWARD: "logprob_entropy forward",
            memory.STEP: FULL_UPDATE,
            memory.MICRO_BATCHES: in_micro_batches(8, NOTHING, RECORDED, "0.5B"),
        }
        return {what: memory.of_contest(contests.get(contest, {})) for what, contest in held.items()}
    return {what: {} if options.only else memory.measure(what, options.short) for what in memory.CONTESTS}


def sources_of(contests: dict[str, Contenders]) -> dict[str, Any]:
    """The contests that only serve to compute other contests from their times (computed.py). No page shows these
    contests.
    """
    return {
        contest: {name: report.of_contender(timing) for name, timing in rivals.items()}
        for contest, rivals in contests.items()
        if is_source(contest)
    }


def quiet_of(log: Log) -> quiet.Judged | None:
    """Judges whether the machine was quiet. Returns None if there were no probes."""
    if not any(log.probes):
        return None
    return quiet.judge(log.probes, quiet.earlier_level(HERE / "results", log.facts["machine"], log.facts["threads"]))


def write(folder: Path, run: dict[str, Any]) -> Path:
    base = folder / f"{run['machine']}-{run['date']}"
    base.parent.mkdir(parents=True, exist_ok=True)
    file = base.with_suffix(".json")
    file.write_text(json.dumps(run, indent=1, default=str) + "\n")
    base.with_suffix(".md").write_text(page.page_of(file))
    return base


if __name__ == "__main__":
    sys.exit(main())
