"""Writes docs/performance.md from the results in benchmarks/results/.

    python tools/performance.py            # after a benchmark run whose result was committed
    python tools/performance.py --check    # checks that the page matches the results; writes nothing

No number of the page is typed by hand: tests/test_pages.py runs the check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Performance

What the library costs, and what it is compared with. `tools/performance.py` writes this page from the results of whole
benchmark runs in [`benchmarks/results`](../benchmarks/results); no number on it is typed.

How to read the tables: each row is one contest. All contenders are held in one run and take turns, round by round; a
time is the median over the rounds, a ratio is the median of the rounds' ratios. A peer is called as its users call it,
and is checked to compute the same. "TRL" is TRL's own torch functions on the `[B, T, V]` logits that its users have. A
target is written down before the run; where it was missed, the notes below the table say what was measured to be the
bottleneck.

To measure on your machine: `make bench` (ten minutes), on a GPU `make gpu`.
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
    text = page()
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != text:
            print("docs/performance.md is not what benchmarks/results say: run python tools/performance.py")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    runs = newest()
    parts = [HEAD, *(section(path, run) for path, run in runs)]
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
    met = sum(row["outcome"] == "met" for row in judged)
    others = [row for row in run["targets"] if not row["bound"]]
    parts = [
        f"\n## {name_of(run)}, {run['date']}\n",
        f"{circumstances(run)} {met} of {len(judged)} targets are met.\n",
        table(("what", "ours", "against", "ratio", "target"), [judged_cells(row) for row in judged]),
        notes(path),
        "Measured in the same run, without a target:\n",
        table(("what", "ours", "against", "ratio"), [cells(row) for row in others]),
        f"Every contender, with spreads and rounds: [`{path.stem}.md`](../benchmarks/results/{path.stem}.md).\n",
    ]
    return "\n".join(part for part in parts if part)


def name_of(run: dict[str, Any]) -> str:
    return f"{run['cpu']}, {run['cores']} cores" if run["device"] == "cpu" else str(run["gpu"])


def circumstances(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    speed = " and ".join(f"{rate:.1f} GB/s ({what})" for what, rate in run["gigabytes_per_second"].items())
    return f"{versions}; commit {run['commit']}; memory at {speed}."


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
