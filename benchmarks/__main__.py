"""Measure everything, print one table, and keep the result.

    python -m benchmarks                 all of it: the full sizes, some ten minutes, a file in benchmarks/results/
    python -m benchmarks --short         does every benchmark run? Small inputs; writes nothing
    python -m benchmarks --only topk     some of it (pytest's -k); writes nothing

A missed target is no error; a benchmark that fails is one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from . import machine, memory, plot, report, timing
from .report import Line
from .sizes import FULL, SHORT
from .timing import Contenders

HERE = Path(__file__).parent


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    facts = machine.describe()
    if facts["load_before"] > 0.5:
        console.print(f"[yellow]This machine is busy (load {facts['load_before']:.1f}): timings will not mean much.")
    contests, failed = run_pytest(options.short, options.only)
    judged = report.lines(contests, options.short)
    peaks = {} if options.only else memory.measure(options.short)
    judged += report.memory_line(peaks, SHORT if options.short else FULL, options.short)

    title = "d3s_kernels, small inputs: no targets" if options.short else "d3s_kernels: targets and what was measured"
    caption = describe(facts, report.gigabytes_per_second(contests))
    console.print(report.table(title, caption, judged))
    if failed:
        console.print("[bold red]A benchmark failed; see above.")
    elif not options.short and not options.only:
        console.print(f"Written to {write(facts, title, caption, judged, contests, peaks)}.{{json,md,png}}")
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small inputs, under two minutes; writes nothing")
    parser.add_argument("--only", metavar="EXPRESSION", help="some benchmarks (pytest's -k); writes nothing")
    return parser.parse_args()


def run_pytest(short: bool, only: str | None) -> tuple[dict[str, Contenders], bool]:
    """The contests that were held, and whether any failed. pytest's own lines are the progress shown."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", str(HERE), "-v", "--no-header", "--benchmark-quiet"]
        command += [f"--benchmark-json={results}", *(["--short"] if short else []), *(["-k", only] if only else [])]
        done = subprocess.run(command, cwd=HERE.parent, check=False)
        return (timing.read(results) if results.exists() else {}), done.returncode != 0


def describe(facts: dict[str, Any], bandwidth: dict[str, float]) -> str:
    parts = [f"{facts['cpu']}, {facts['threads']} threads of {facts['cores']} cores", facts["date"]]
    parts += [f"{package} {version}" for package, version in facts["versions"].items() if package != "transformers"]
    parts += [f"commit {facts['commit']}"] if facts["commit"] else []
    parts += [f"{name} {rate:.1f} GB/s" for name, rate in bandwidth.items()]
    return (
        f"{'; '.join(parts)}. Contenders take turns: times are medians over the rounds, ratios the medians of the "
        "rounds' ratios. Warm-up, and with it torch.compile's compilation, is not counted."
    )


def write(
    facts: dict[str, Any],
    title: str,
    caption: str,
    judged: list[Line],
    contests: dict[str, Contenders],
    peaks: dict[str, int],
) -> Path:
    base = HERE / "results" / f"{facts['machine']}-{facts['date']}"
    base.parent.mkdir(exist_ok=True)
    everything = facts | report.data(judged, contests) | {"peak_extra_bytes": peaks}
    base.with_suffix(".json").write_text(json.dumps(everything, indent=1, default=str) + "\n")
    base.with_suffix(".md").write_text(report.markdown(title, caption, judged, contests))
    plot.save(base.with_suffix(".png"), title, f"{facts['cpu']}, {facts['cores']} cores, {facts['date']}", judged)
    return base


if __name__ == "__main__":
    sys.exit(main())
