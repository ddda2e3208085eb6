"""Makes the page of a run from the run's JSON. `python -m benchmarks` writes it, and `python -m benchmarks.page` writes
all pages of benchmarks/results again.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from .withdrawn import reasons, what_stands

# Bytes of memory a second, by NVIDIA's data sheets.
SPECIFIED = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12, "NVIDIA B200": 8.0e12}

RESULTS = Path(__file__).with_name("results")
Row = dict[str, Any]  # one of a run's targets
Run = dict[str, Any]

READING = """\
All contenders of a contest take turns, round by round. Compilation and other warm-up is not timed. A peer is called
as its users call it, and is checked to compute the same. A target is written down before the run. It is met or missed
if the whole range is on one side of it, and undecided otherwise."""
READING_OF = {
    "cuda": """\
Times are medians over the rounds. A ratio is the median of the rounds' ratios. From six rounds on, its range follows:
the interval in which the median lies with 95 % confidence. Times are taken by CUDA events. A call of less than a
millisecond that does not wait for the GPU is replayed as a CUDA graph. Where its inputs are small, most contests take
copies of them in turn, which are together larger than the GPU's cache. An overhead is the time until a call returns.
"verl's chunks" is verl's head in PyTorch, not its Triton kernel.""",
    "cpu": """\
Times are those of the fastest round, because a CPU is shared: the fastest of many rounds is what the work takes when
nobody interferes. Ratios are of fastest rounds, too. From nine rounds on, the range of a ratio follows: the rounds
are dealt in turn into three parts, and the range has the ratios of the three. Medians stand beside both. A contender
that takes very long is not timed in every round, but in one call or as the fastest of three; the range then allows for
an error of 15 % in that time. Probes, of reading memory
and of a product of matrices, run between the rounds. All contenders take memory in pages of 2 MiB
(`THP_MEM_ALLOC_ENABLE=1`), because getting fresh memory in pages of 4 KiB takes longer than using it. "TRL" is TRL's
torch functions on `[B, T, V]` logits. "Unsloth's head, in torch" is Unsloth's code for devices without Triton. "AVX2
alone" is this machine limited to AVX2, in the library, in torch and in torch.compile.""",
}


def read(path: Path) -> Run:
    """The run in this file, without withdrawn figures."""
    return what_stands(json.loads(path.read_text(encoding="utf-8")), path.stem)


def newest() -> list[Run]:
    """The latest run of each machine, without withdrawn figures: GPUs first, and newer runs first."""
    runs = {run["machine"]: run for run in map(read, sorted(RESULTS.glob("*.json"), key=lambda path: path.stem[-10:]))}
    return sorted(runs.values(), key=lambda run: (run["device"], run["date"]), reverse=True)


def page_of(path: Path) -> str:
    run, notes = read(path), path.with_name(f"{path.stem}-notes.md")
    judged = [row for row in run["targets"] if row["bound"]]
    others = [row for row in run["targets"] if not row["bound"]]
    parts = [
        f"# {heading(run)}",
        circumstances(run),
        READING,
        READING_OF[run["device"]],
        *section("Targets", outcomes(run), table(("what", "ours", "against", "ratio", "target"), map(cells, judged))),
        *section("Withdrawn", "\n".join(f"- {reason}" for reason in reasons(path.stem))),
        *section("Notes", notes.read_text(encoding="utf-8").strip() if notes.exists() else ""),
        *section("Without a target", table(("what", "ours", "against", "ratio"), (cells(row)[:-1] for row in others))),
        *section(
            "Every contender",
            table(("contest", "contender", "fastest", "median (95 % interval)", "rounds"), contenders(run)),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def section(title: str, *parts: str) -> list[str]:
    """A heading and its parts, or nothing if the last part is empty."""
    return [f"## {title}", *parts] if parts[-1] else []


def heading(run: Run) -> str:
    small = ", small inputs" if run.get("small_inputs") else ""
    noisy = ", not quiet" if run["quiet"] and not run["quiet"]["quiet"] else ""
    return f"{name_of(run)}, {run['date']}{small}{noisy}"


def name_of(run: Run) -> str:
    return f"{run['cpu']}, {run['cores']} cores" if run["device"] == "cpu" else str(run["gpu"])


def circumstances(run: Run) -> str:
    rates = " and ".join(f"{rate:.1f} GB/s ({what})" for what, rate in run["gigabytes_per_second"].items())
    parts = [", ".join(f"{package} {version}" for package, version in run["versions"].items())]
    if run["device"] == "cpu":
        parts.append(f"SIMD {run['build_info']['simd']}")
        said = [run[key]["said"] for key in ("threads_tried", "quiet") if run.get(key)]
    else:
        parts.append(f"driver {run['driver']}, CUDA {run['cuda']}, Triton {run['triton']}")
        said = [f"{len(run['failed'])} of its benchmarks failed or did not end."] if run["failed"] else []
    parts += [f"commit {run['commit']}", f"memory at {rates or 'no known rate'}"]
    parts += [f"{rate:.0f} TFLOP/s ({what})" for what, rate in run["teraflops"].items()]
    return " ".join([f"{'; '.join(parts)}.", *said])


def outcomes(run: Run) -> str:
    """How many targets were met. Early results do not name the rule by which they were judged, since there was only one
    rule.
    """
    judged = [row["outcome"] for row in run["targets"] if row["bound"]]
    rule = f", judged by {run['judged_by']}" if "judged_by" in run else ""
    told = ", ".join(f"{count} {outcome}" for outcome, count in Counter(judged).items())
    return f"Of {len(judged)} targets{rule}: {told}."


def cells(row: Row) -> tuple[str, ...]:
    """The five columns of a target's row. The first column has the contest, followed by its size; the last has the
    bound, followed by the outcome.
    """
    outcome = row["outcome"] if row["outcome"] == "met" else f"**{row['outcome']}**"
    ours, other, value = (plain(row[column]) for column in ("ours", "against", "value"))
    value = "; ".join(filter(None, (value, row.get("did"))))
    return of_size(row["what"], row["size"]), ours, other, value, f"{row['bound']}: {outcome}"


def plain(text: str) -> str:
    """The text with its numbers written without exponents: `2,310 MiB`."""
    return re.sub(r"\d\.\d+e\+\d+", lambda number: f"{float(number[0]):,.0f}", text)


def contenders(run: Run) -> list[tuple[str, ...]]:
    """The rows of the table of all contenders. Early results have no fastest rounds, and no intervals of medians."""
    return [
        (
            of_size(contest, timing["size"]),
            name,
            duration(timing["fastest_seconds"]) if "fastest_seconds" in timing else "",
            with_range(duration(timing["median_seconds"]), timing.get("median_interval")),
            f"{timing['rounds']}" + (f" ({timing['timed_by']})" if timing["timed_by"] != "host" else ""),
        )
        for contest, rivals in run["contests"].items()
        for name, timing in sorted(rivals.items(), key=lambda pair: pair[1]["median_seconds"])
    ]


def with_range(text: str, ends: list[float] | None) -> str:
    return f"{text} ({' to '.join(map(duration, ends))})" if ends else text


def of_size(what: str, size: str) -> str:
    return f"{what}, {size}" if size else what


def elements(size: str) -> int:
    """The product of the numbers in `8,192 x 8,192 x 8,192 bfloat16`."""
    return prod(int(word.replace(",", "")) for word in size.split() if word[0].isdigit())


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown; empty if there are no rows."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if len(lines) > 2 else ""


if __name__ == "__main__":
    for file in RESULTS.glob("*.json"):
        file.with_suffix(".md").write_text(page_of(file), encoding="utf-8")
