"""Measure everything, print one table, and keep the result.

    python -m benchmarks                 all of it: the full sizes, some 22 minutes, files in benchmarks/results/
    python -m benchmarks --short         checks that every benchmark runs, on small inputs; writes nothing
    python -m benchmarks --only topk     some of it (pytest's -k); writes nothing
    python -m benchmarks --device cuda   all of it on a GPU, with its own sizes and targets; some two minutes

A CPU that is disturbed is measured again, for up to four minutes more (quiet.py); a run that was disturbed nevertheless
says so in its title. A missed target is not an error; a failed benchmark is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from . import machine, memory, quiet, report, timing
from .harness import describe
from .report import Line
from .sizes import rollouts, sizes_for
from .targets import AVX2_ENVIRONMENT, STEP_CONTEST, STEP_MEMORY, TARGETS, above_avx2, targets_of
from .timing import Contenders

HERE = Path(__file__).parent
# torch then asks the system for pages of 2 MiB. In pages of 4 KiB fresh memory takes longer than what is done with it.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("[bold red]There is no CUDA device here.")
        return 1
    facts = machine.describe(options.device)
    if facts["load_before"] > 0.5:
        console.print(f"[yellow]This machine is busy (load {facts['load_before']:.1f}): timings will not mean much.")
    contests, failed = measure(options, above_avx2(facts["build_info"]))
    whole = not options.short and not options.only
    judged = report.lines(contests, targets_of(options.device, facts["build_info"]), short=options.short, whole=whole)
    sizes = sizes_for(options.device, options.short)
    peaks = peak_memory(options, contests)
    logits = describe(sizes.sequences, sizes.tokens, sizes.vocabulary, dtype=torch.bfloat16)
    allowed = memory.allowed(sizes) if options.device == "cpu" else None
    judged += report.memory_line(memory.FORWARD, logits, peaks[memory.FORWARD], short=options.short, allowed=allowed)
    judged += report.memory_line(
        memory.STEP, rollouts(sizes), peaks[memory.STEP], short=options.short, share=STEP_MEMORY
    )

    seen = watched(contests, facts["machine"])
    title = title_of(options, seen)
    caption = circumstances(facts, report.gigabytes_per_second(contests), seen)
    console.print(report.table(title, caption, judged))
    if failed:
        console.print("[bold red]A benchmark failed; see above.")
    # A GPU is available only for minutes, so its results are kept even if some benchmarks failed.
    if whole and (not failed or (options.device == "cuda" and contests)):
        facts["failed"] = failed
        facts["quiet"] = seen and seen.data()
        console.print(f"Written to {write(options.out, facts, title, caption, judged, contests, peaks)}.{{json,md}}")
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small inputs, under two minutes; writes nothing")
    parser.add_argument("--only", metavar="EXPRESSION", help="some benchmarks (pytest's -k); writes nothing")
    parser.add_argument("--device", choices=list(TARGETS), default="cpu", help="where the inputs are")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=HERE / "results", help="where results are written"
    )
    parser.add_argument("--seconds", type=float, help="start no benchmark after so long")
    return parser.parse_args()


def measure(options: argparse.Namespace, above_avx2: bool) -> tuple[dict[str, Contenders], bool]:
    """All contests, and whether any failed: on a CPU with more than AVX2, some again in a process with AVX2 alone."""
    contests, code = run_pytest(options, HERE, {})
    codes = {code}
    if above_avx2 and options.device == "cpu" and not options.short:
        again, code = run_pytest(options, HERE / "bench_avx2.py", AVX2_ENVIRONMENT)
        contests, codes = contests | again, codes | {code}
    none_chosen = int(pytest.ExitCode.NO_TESTS_COLLECTED)  # by --only, in one of the two
    return contests, bool(codes - {0, none_chosen}) or not contests


def run_pytest(
    options: argparse.Namespace, where: Path, environment: dict[str, str]
) -> tuple[dict[str, Contenders], int]:
    """Runs contests with pytest, whose output shows the progress. Returns their results and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", str(where), "-v", "--no-header", "--benchmark-quiet"]
        command += [f"--benchmark-json={results}", f"--device={options.device}"]
        command += ["--short"] if options.short else []
        command += ["-k", options.only] if options.only else []
        command += [f"--seconds={options.seconds}"] if options.seconds else []
        # Code that torch.compile made for other instructions, and finds in its cache, would crash.
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled", **LARGE_PAGES, **environment}
        done = subprocess.run(command, cwd=HERE.parent, env=os.environ | environment, check=False)
        return (timing.read(results) if results.exists() else {}), done.returncode


def peak_memory(options: argparse.Namespace, contests: dict[str, Contenders]) -> dict[str, dict[str, int]]:
    """Bytes by contest and contender: on a GPU from the contests above, on a CPU each in a separate process."""
    if options.device == "cuda":
        held = {memory.FORWARD: "logprob_entropy forward", memory.STEP: f"{STEP_CONTEST}, 0.5B"}
        return {what: memory.of_contest(contests.get(contest, {})) for what, contest in held.items()}
    return {what: {} if options.only else memory.measure(what, options.short) for what in memory.CONTESTS}


def watched(contests: dict[str, Contenders], machine: str) -> quiet.Judged | None:
    """Whether the machine was quiet; None where no probe watched it."""
    one_each = (next(iter(contenders.values())).watched for contenders in contests.values())
    seen = [found for found in one_each if found]
    return quiet.judge(seen, quiet.earlier_level(HERE / "results", machine)) if seen else None


def title_of(options: argparse.Namespace, seen: quiet.Judged | None) -> str:
    if options.short:
        return "d3s_kernels, small inputs: no targets"
    noisy = ", on a machine that was not quiet" if seen and not seen.quiet else ""
    return f"d3s_kernels: targets and what was measured{noisy}"


def circumstances(facts: dict[str, Any], bandwidth: dict[str, float], seen: quiet.Judged | None) -> str:
    parts = [name_of(facts), facts["date"]]
    parts += [f"{package} {version}" for package, version in facts["versions"].items() if package != "transformers"]
    parts += [f"commit {facts['commit']}"] if facts["commit"] else []
    parts += [f"{name} {rate:.1f} GB/s" for name, rate in bandwidth.items()]
    return (
        f"{'; '.join(parts)}. {seen.said + ' ' if seen else ''}Contenders take turns: times are medians over the "
        "rounds, ratios the medians of the rounds' ratios, with their 95 % intervals. Warm-up, and with it "
        f"torch.compile's compilation, is not counted.{how(facts['device'])}"
    )


def name_of(facts: dict[str, Any]) -> str:
    if facts["device"] == "cuda":
        return f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}"
    return f"{facts['cpu']}, {facts['threads']} threads of {facts['cores']} cores, SIMD {facts['build_info']['simd']}"


def how(device: str) -> str:
    if device == "cpu":
        return ""
    return (
        " Timed by CUDA events; what takes less than a millisecond and does not wait for the GPU, by replaying a CUDA "
        "graph, over copies of small inputs that are together larger than the GPU's cache. Overheads are the time "
        "until the call returns."
    )


def write(
    folder: Path,
    facts: dict[str, Any],
    title: str,
    caption: str,
    judged: list[Line],
    contests: dict[str, Contenders],
    peaks: dict[str, dict[str, int]],
) -> Path:
    base = folder / f"{facts['machine']}-{facts['date']}"
    base.parent.mkdir(parents=True, exist_ok=True)
    everything = facts | report.data(judged, contests) | {"peak_extra_bytes": peaks}
    base.with_suffix(".json").write_text(json.dumps(everything, indent=1, default=str) + "\n")
    base.with_suffix(".md").write_text(report.markdown(title, caption, judged, contests))
    return base


if __name__ == "__main__":
    sys.exit(main())
