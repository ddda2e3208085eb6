"""Writes docs/performance.md and its picture from the results in benchmarks/results/.

    python tools/performance.py            # after a benchmark run whose result was committed
    python tools/performance.py --check    # checks that both match the results; writes nothing

No number of the page is typed by hand: tests/test_pages.py runs the check.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from performance_picture import MOST_BYTES, draw, words, words_in

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = PAGE.with_suffix(".png")

TITLE = """# Performance
"""
NEVER_QUIET = """
**No run on a CPU below had a quiet machine.** Its ratios are of the fastest of many rounds that were taken in turn; its
times may still be too long.
"""
HEAD = """
What the library costs, and what it is compared with. `tools/performance.py` writes this page from the results of whole
benchmark runs in [`benchmarks/results`](../benchmarks/results); no number on it is typed.

![how many times as fast the ops are as what is run today, op by op]({picture})

How to read the tables: each row is one contest. All contenders are held in one run and take turns, round by round. Of
each there are two times: its fastest round, and its median over the rounds.

A CPU is judged by the ratio of the fastest rounds, a GPU by the median of the rounds' ratios. A CPU is shared, and the
fastest of many rounds is what the work takes when nobody interferes; a GPU is not shared, and its rounds differ little.

Behind a ratio stands its range. On a CPU the rounds are dealt in turn into three parts, from nine rounds on, and the
range has the ratios of the three parts. On a GPU it is the interval in which the median lies with 95 % confidence, from
six rounds on. A contender that takes very long is timed once; the range then allows for an error of 15 % in that time.

A peer is called as its users call it, and is checked to compute the same. "TRL" is TRL's own torch functions on the
`[B, T, V]` logits that its users have. "Unsloth's head, in torch" is the code that Unsloth has for devices without
Triton; its users have GPUs. "AVX2 alone" is this machine without its better instructions, in the library, in torch and
in torch.compile.

All contenders run with `THP_MEM_ALLOC_ENABLE=1`, with which torch takes large tensors in pages of 2 MiB: in pages of
4 KiB, fresh memory takes longer here than what is done with it, and more so for what allocates more. On a CPU they run
on one thread or on all, whichever is faster there: a core that the host has taken away for a moment makes the threads
on the others wait.

A target is written down before the run. It is met or missed if the whole range is on one side of it, and undecided
otherwise; the notes below the table say what was measured to be the bottleneck.

On a CPU two short probes, of reading memory and of a product of matrices, run before, between and after all rounds.
The level of a probe is the rate that a tenth of them reach. A run is quiet if at most a tenth of its probes is more
than 15 % below it; else its heading says so. On a GPU there is no such probe.

To measure on your machine: `make bench` (some 24 minutes), on a GPU `make gpu`.
"""
NO_GPU = """
## GPUs

No result of a GPU is committed yet: the CUDA kernels are compiled and emulated, and no time is claimed for them.
[On GPUs](gpu.md) has what is known of them without one, and [`benchmarks/targets.py`](../benchmarks/targets.py) the
targets.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is another")
    check = parser.parse_args().check
    runs = newest()
    shown = next(run for _, run in reversed(runs) if run["device"] == "cpu")
    bars = "fastest rounds, with their range" if "judged_by" in shown else "dark bars are 95 % intervals"
    heading = f"{heading_of(shown)}\nSIMD {shown['build_info']['simd']}; {bars}"
    if not check:
        PAGE.write_text(page(runs), encoding="utf-8")
        draw(PICTURE, heading, shown)
    wrong = [
        *([PAGE] if PAGE.read_text(encoding="utf-8") != page(runs) else []),
        *([PICTURE] if words_in(PICTURE) != words(heading, shown) or PICTURE.stat().st_size > MOST_BYTES else []),
    ]
    for file in wrong:
        print(f"{file.relative_to(ROOT)} is not what benchmarks/results say: run python tools/performance.py")
    return int(bool(wrong))


def page(runs: list[tuple[Path, dict[str, Any]]]) -> str:
    quiet = [run["quiet"] is None or run["quiet"]["quiet"] for _, run in runs if run["device"] == "cpu"]
    head = HEAD.format(picture=PICTURE.name)
    parts = [
        TITLE,
        *([] if any(quiet) or not quiet else [NEVER_QUIET]),
        head,
        *(section(path, run) for path, run in runs),
    ]
    if all(run["device"] == "cpu" for _, run in runs):
        parts.append(NO_GPU)
    return "".join(parts)


def newest() -> list[tuple[Path, dict[str, Any]]]:
    """The latest run of each machine."""
    runs: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem[-10:]):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs[run["machine"]] = path, run
    return list(runs.values())


def section(path: Path, run: dict[str, Any]) -> str:
    judged = [row for row in run["targets"] if row["bound"]]
    outcomes = Counter(row["outcome"] for row in judged)
    told = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in outcomes)
    others = [row for row in run["targets"] if not row["bound"] and row["ours"]]
    parts = [
        f"\n## {heading_of(run)}\n",
        f"{circumstances(run)} Of {len(judged)} targets{judged_by(run)}: {told}.\n",
        table(("what", "ours", "against", "ratio", "target"), [judged_cells(row) for row in judged]),
        notes(path),
        "Measured in the same run, without a target:\n",
        table(("what", "ours", "against", "ratio"), [cells(row) for row in others]),
        f"Every contender, with intervals and rounds: [`{path.stem}.md`](../benchmarks/results/{path.stem}.md).\n",
    ]
    return "\n".join(part for part in parts if part)


def judged_by(run: dict[str, Any]) -> str:
    """The rule by which a run was judged; empty for early results, which do not name it: there was only one rule."""
    return f", judged by {run['judged_by']}" if "judged_by" in run else ""


def heading_of(run: dict[str, Any]) -> str:
    noisy = run["quiet"] and not run["quiet"]["quiet"]
    return f"{name_of(run)}, {run['date']}{', not quiet' if noisy else ''}"


def name_of(run: dict[str, Any]) -> str:
    return f"{run['cpu']}, {run['cores']} cores" if run["device"] == "cpu" else str(run["gpu"])


def circumstances(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    speed = " and ".join(f"{rate:.1f} GB/s ({what})" for what, rate in run["gigabytes_per_second"].items())
    if run["device"] == "cpu":
        said = [run[key]["said"] for key in ("threads_tried", "quiet") if run.get(key)]
        machine = f"commit {run['commit']}; SIMD {run['build_info']['simd']}; memory at {speed or 'no known rate'}."
        return " ".join([f"{versions}; {machine}", *said])
    products = " and ".join(f"{rate:.0f} TFLOP/s ({what})" for what, rate in run["teraflops"].items())
    driver = f"driver {run['driver']}, CUDA {run['cuda']}, Triton {run['triton']}"
    failed = f" {len(run['failed'])} of its benchmarks failed or did not end." if run["failed"] else ""
    return f"{versions}; {driver}; commit {run['commit']}; memory at {speed or 'no known rate'}; {products}.{failed}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    what = f"{row['what']}, {row['size']}" if row["size"] else row["what"]
    return what, row["ours"], row["against"], row["value"]


def judged_cells(row: dict[str, Any]) -> tuple[str, ...]:
    outcome = row["outcome"] if row["outcome"] == "met" else f"**{row['outcome']}**"
    return *cells(row), f"{row['bound']}: {outcome}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def notes(path: Path) -> str:
    """The hand-written notes on a result, or an empty text."""
    file = path.with_name(f"{path.stem}-notes.md")
    return file.read_text(encoding="utf-8") if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
