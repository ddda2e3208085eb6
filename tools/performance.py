"""Writes docs/performance.md, its picture, and the page of each run, from the JSON in benchmarks/results.

    python tools/performance.py            # after a benchmark run whose result was committed
    python tools/performance.py --check    # checks that all of them match the results; writes nothing

No measured number of these pages is typed by hand: tests/test_pages.py runs the check.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from performance_picture import MOST_BYTES, draw, words, words_in  # it also makes `benchmarks` importable

from benchmarks import page as pages
from benchmarks.page import SPECIFIED, Row, Run
from benchmarks.withdrawn import FULL_UPDATE, reasons

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = PAGE.with_suffix(".png")
Result = tuple[Path, Run]

# The rows of a table: what the page says, the contest, and what ours is compared with. Rows of no run are left out.
HEAD, MASKED = "linear_logprob_entropy forward", "with a sampling mask, added to a gradient"
RATIO = "importance_ratio with its gradient, sequence"
MASKED_HEAD = "LM head with a sampling mask, forward and backward, gradient added in place"
GPU_ROWS = (
    ("`logprob_entropy`, forward", "logprob_entropy forward", "TRL's Triton kernel"),
    ("`logprob_entropy`, backward", "logprob_entropy backward, both gradients", "copy"),
    (
        "`logprob_entropy`, forward, half of the rows masked",
        "logprob_entropy forward, half of the rows masked (right-padded)",
        "all rows",
    ),
    ("`select_tokens_from_logits`", "select_tokens_from_logits", "logprob_entropy"),
    ("LM head, forward", f"{HEAD}, wide, bf16", "matmul"),
    ("LM head, forward", f"{HEAD}, wide, bf16", "Liger's head"),
    ("LM head, forward and backward", f"{HEAD} + backward, wide, bf16", "four products"),
    ("LM head, forward and backward", f"{HEAD} + backward, wide, bf16", "Liger's head"),
    (
        "LM head, forward and backward, 10 % of the rows with a gradient",
        f"{HEAD} + backward, 10% of the tokens, wide, bf16",
        "Liger's head, all tokens",
    ),
    (MASKED_HEAD, f"{HEAD} + backward, {MASKED}", "all tokens"),
    ("`topk_mask`, 10 % of each row", "topk_mask of a batch, 10%", "topk + scatter"),
    ("`topk_mask`, 10 % of one segment", "topk_mask of a segment, 10%", "topk + scatter"),
    ("`max_variance_select` in groups", "max_variance_select, groups", "vectorised PyTorch"),
    ("`max_variance_select` in one pool", "max_variance_select, pool", "vectorised PyTorch"),
    ("`importance_ratio` of sequences, with gradient", RATIO, "verl's formula"),
    ("TRL's update of a 0.5B model, half of the rollouts and 10 % of their tokens kept", FULL_UPDATE, "GRPOTrainer"),
    ("this update's peak memory, beyond the model", "TRL's update, peak memory beyond its model", "GRPOTrainer"),
)
CPU_ROWS = (
    ("`logprob_entropy`, forward", "logprob_entropy forward", "TRL"),
    ("`logprob_entropy`, forward", "logprob_entropy forward", "torch.compile"),
    ("`logprob_entropy`, backward", "logprob_entropy backward, both gradients", "TRL"),
    (MASKED_HEAD, f"{HEAD} + backward, {MASKED}", "all tokens"),
    ("`topk_mask`, 10 % of each row", "topk_mask of a batch, 10%", "topk + scatter"),
    ("`max_variance_select` in groups", "max_variance_select, groups", "vectorised PyTorch"),
    ("`importance_ratio` of sequences, with gradient", RATIO, "verl's formula"),
)
# What the page says for names in the results. Names that are not here stay as they are.
OTHERS = {
    "copy": "a copy of the logits",
    "all rows": "no row masked",
    "logprob_entropy": "`logprob_entropy`",
    "matmul": "its matrix product",
    "four products": "its four matrix products",
    "Liger's head, all tokens": "Liger's head, all rows with a gradient",
    "all tokens": "our LM head without the mask",
    "topk + scatter": "torch's `topk` and `scatter`",
    "TRL": "TRL's PyTorch",
    "torch.compile": "the formula under `torch.compile`",
}
MISSED = {
    "topk_mask of a batch": "`topk_mask`, 5 to 20 % of each row",
    "importance_ratio, entropy_group": "`importance_ratio` of entropy groups",
    "importance_ratio with its gradient, entropy_group": "`importance_ratio` of entropy groups, with gradient",
    "overhead of a call": "time until a call returns, by op",
    "topk_mask of a batch, 10%, in Triton": "`topk_mask` in Triton, 10 % of each row",
    "TRL's update, peak memory beyond its model": "TRL's update, peak memory",
    f"{HEAD}, wide, bf16": "LM head, forward, bfloat16 logits",
    f"{HEAD}, wide, bf16, fp32 logits": "LM head, forward, float32 logits",
    "max_variance_select, pool": "`max_variance_select` in one pool",
}
AGAINST = OTHERS | {"copy": "a copy", "CUDA library": "our CUDA kernel"}

BEGIN = """# Performance

![for each op: its speed over the speed of the code that is used today]({picture})

`tools/performance.py` writes this page from [`benchmarks/results`](../benchmarks/results).

## On a GPU

A cell has our time, the other's time and their ratio. The ratio's 95 % interval follows in brackets, if it is wide
enough to show. Sizes of LM heads are rows x width x vocabulary. A row without a size has the size above it.

"""
SAID_PLAINLY = """
- `logprob_entropy`'s forward reads {rates}.
- verl's formula is eager PyTorch. Compiled, it may be as fast as ours for ratios of tokens.
"""
OF_THE_UPDATE = """\
- TRL's update ran in {rounds} rounds{too_few}. All completions are full, without padding to skip.
- The update gains most from half of the rollouts. With all rollouts and tokens it takes {our_head} with our LM head and
  {trl} with TRL's, because ours makes float32 logits.
"""
MISSED_HERE = """
## Missed on a GPU

"""
WITHDRAWN = """
## Withdrawn

These figures stood here, but did not say what they seemed to say:

"""
NOT_QUIET = " Other work slowed {low:,} of {probes:,} probes of its speed, so its times may be too long."
MEASURED = """
## How it was measured

Contenders take turns, round by round; warm-up and compilation are not timed. On a GPU, a ratio is the median of the
rounds' ratios. A CPU is shared, so there a ratio is that of the fastest rounds. Other code is called as its users call
it, and checked to compute the same. Targets are written down before a run; a target within the interval is undecided.
To measure on your machine: `make gpu`, or `make bench` on a CPU. Each machine's page has all targets, what bounds them,
and every contender:

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is another")
    check = parser.parse_args().check
    results = newest()
    _, shown = results[0]
    heading = f"{pages.heading(shown)}\nmedians; dark bars are their 95 % intervals"
    wanted = {PAGE: page(results)} | {path.with_suffix(".md"): pages.page_of(path) for path in RESULTS.glob("*.json")}
    if not check:
        for file, text in wanted.items():
            file.write_text(text, encoding="utf-8")
        draw(PICTURE, heading, shown)
    wrong = [file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    if words_in(PICTURE) != words(heading, shown) or PICTURE.stat().st_size > MOST_BYTES:
        wrong.append(PICTURE)
    for file in wrong:
        print(f"{file.relative_to(ROOT)} is not what benchmarks/results say: run python tools/performance.py")
    return int(bool(wrong))


def newest() -> list[Result]:
    """The latest run of each machine without what was withdrawn, GPUs first, the newest first."""
    runs = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem[-10:]):
        run = pages.read(path)
        runs[run["machine"]] = path, run
    return sorted(runs.values(), key=lambda result: (result[1]["device"], result[1]["date"]), reverse=True)


def page(results: list[Result]) -> str:
    gpus = [run for _, run in results if run["device"] == "cuda"]
    cpus = [run for _, run in results if run["device"] == "cpu"]
    parts = [
        BEGIN.format(picture=PICTURE.name),
        comparisons(GPU_ROWS, gpus),
        said_plainly(gpus),
        MISSED_HERE,
        missed(gpus),
        WITHDRAWN,
        *(f"- {reason}\n" for reason in dict.fromkeys(why for path, _ in results for why in reasons(path.stem))),
        "\n## On a CPU\n\n",
        *(f"{counts(run)}{'' if run['quiet']['quiet'] else NOT_QUIET.format(**run['quiet'])}\n\n" for run in cpus),
        comparisons(CPU_ROWS, cpus),
        MEASURED,
        *(f"- [{pages.heading(run)}](../benchmarks/results/{path.stem}.md)\n" for path, run in results),
    ]
    return "".join(parts)


def comparisons(rows: tuple[tuple[str, str, str], ...], runs: list[Run]) -> str:
    """One column for each run; the size is that of the first run which has the row."""
    lines, last = [], ""
    for label, contest, other in rows:
        found = [row_of(run, contest, other) for run in runs]
        size = next((row["size"] for row in found if row), None)
        if size is not None:
            named = size.removeprefix(last).removeprefix(", ").replace("kept tokens", "ids in the sets")
            lines.append((f"{label}, {named}" if named else label, OTHERS.get(other, other), *map(cell, found)))
            last = size
    return pages.table(("what", "compared with", *map(short, runs)), lines) + "\n"


def short(run: Run) -> str:
    """A GPU's name without its maker and its memory."""
    return pages.name_of(run).removeprefix("NVIDIA ").partition(" 80GB")[0]


def row_of(run: Run, contest: str, other: str) -> Row | None:
    return next((row for row in run["targets"] if row["what"] == contest and against(row) == other), None)


def against(row: Row) -> str:
    return row["against"].partition(":")[0]


def cell(row: Row | None) -> str:
    if row is None:
        return "not measured"
    ours, theirs, ratio = map(shortened, (row["ours"], row["against"].partition(": ")[2], row["value"]))
    ours = ours.partition(" ")[0] if ours.split()[1:] == theirs.split()[1:] else ours  # one unit is enough
    return f"{ours} against {theirs}: {ratio.replace('the bandwidth', 'its bandwidth')}"


def shortened(text: str) -> str:
    """Without the other time, median or fastest, and without an interval that does not show in the digits."""
    text = re.sub(r"; median [^)]*| \((median|fastest) [^)]*\)", "", text)
    text = re.sub(r"^([\d.]+)(\D*) \(\1 to \1\)$", r"\1\2", text)
    return pages.plain(re.sub(r"\(([\d.]+) to ([\d.]+)\)$", "(\\1\N{EN DASH}\\2)", text))


def said_plainly(gpus: list[Run]) -> str:
    rates = [bytes_a_second(run) for run in gpus if pages.name_of(run) in SPECIFIED]
    said = SAID_PLAINLY.format(rates=" and ".join(rates))
    if contest := gpus[0]["contests"].get(FULL_UPDATE):
        trl, our_head = (contest[name] for name in ("GRPOTrainer", "GRPOTrainer with our LM head"))
        said += OF_THE_UPDATE.format(
            rounds=trl["rounds"],
            too_few="" if contest["d3s_kernels"]["times_ours"]["interval"] else ", too few for an interval",
            our_head=pages.duration(our_head["median_seconds"]),
            trl=pages.duration(trl["median_seconds"]),
        )
    return said


def bytes_a_second(run: Run) -> str:
    """The forward reads each logit once."""
    timing = run["contests"]["logprob_entropy forward"]["d3s_kernels"]
    itemsize = {"bfloat16": 2}[timing["size"].split()[-1]]
    rate = itemsize * pages.elements(timing["size"]) / timing["median_seconds"]
    name = pages.name_of(run)
    return f"{rate / 1e12:.2f} TB/s on the {short(run)} (specified: {SPECIFIED[name] / 1e12:.3g})"


def missed(runs: list[Run]) -> str:
    """How many targets were met, and a table of the others, where all calls share a row, and all ratios."""
    found: dict[tuple[str, str], list[list[Row]]] = {}
    for index, run in enumerate(runs):
        for row in run["targets"]:
            if row["outcome"] == "missed":
                what = re.sub(r"^overhead of \w+", "overhead of a call", re.sub(r", \d+%$", "", row["what"]))
                what = MISSED.get(what, what)
                what += f", beside {AGAINST.get(against(row), against(row))}" if row["against"] else ""
                found.setdefault((what, row["bound"]), [[] for _ in runs])[index].append(row)
    lines = [(what, bound, *map(span, of_runs)) for (what, bound), of_runs in found.items()]
    names = map(short, runs)
    return f"{' '.join(map(counts, runs))}\n\n{pages.table(('missed', 'target', *names), lines)}\n"


def counts(run: Run) -> str:
    return f"**{pages.name_of(run)}.** {pages.outcomes(run)}"


def span(rows: list[Row]) -> str:
    """The least and the largest value, with the unit of the target."""
    values = [row["value"].split()[0] for row in sorted(rows, key=lambda row: row["verdict"]["value"])]
    if not values:
        return "not missed"
    unit = " us" if rows[0]["bound"].endswith(" us") else ""
    return " to ".join(dict.fromkeys([values[0], values[-1]])) + unit


if __name__ == "__main__":
    sys.exit(main())
