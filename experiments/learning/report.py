"""The tables of the report, in Markdown. Every number in them was computed from the files of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from . import probe as probing
from . import records
from .ledger import Counts
from .pricings import pricings
from .records import Run
from .setting import Setting
from .stages import known_prices, measured_prices, prices_file, tuning_file
from .statistics import CONFIDENCE, Clock, mean_until, paired, reached, time_to

NOTES = (
    f"± is the half-width of an interval that holds with {CONFIDENCE:.0%} for all arms together (Student's t, paired "
    "by seed, Bonferroni). * marks a difference that is larger than that. In the first tables ± is the standard "
    "deviation over seeds."
)


class Comparison:
    """The runs of an experiment, by arm and in the order of their seeds."""

    def __init__(self, setting: Setting, runs: Sequence[Run]) -> None:
        self.arms = list(dict.fromkeys(run.job.arm for run in runs))
        self.runs = {arm: sorted((r for r in runs if r.job.arm == arm), key=lambda r: r.job.seed) for arm in self.arms}
        self.prices, self.horizon = known_prices(setting)
        self.baselines = [f"GRPO-{count}" for count in (setting.many, setting.few) if f"GRPO-{count}" in self.runs]
        self.by_name = pricings(measured_prices(setting), self.mean_counts([*self.baselines, *self.arms][0]))

    def mean_counts(self, arm: str) -> Counts:
        ends = [run.points[-1].counts for run in self.runs[arm]]
        return Counts(*(round(fmean(column)) for column in zip(*ends, strict=True)))

    def common_end(self, clock: Clock) -> float:
        """The latest time that every run has reached."""
        return min(clock(run.points[-1].counts) for runs in self.runs.values() for run in runs)

    def values(self, arm: str, clock: Clock, time: float, measure: str) -> list[float]:
        if measure == "mean":
            return [mean_until(run, clock, time) for run in self.runs[arm]]
        return [reached(run, clock, time, measure) for run in self.runs[arm]]


def load(setting: Setting, name: str = "curves") -> Comparison:
    return Comparison(setting, records.load(setting.folder / f"{name}.csv"))


def report(setting: Setting, name: str = "curves") -> str:
    comparison = load(setting, name)
    found = prices_file(setting)
    seeds = len(next(iter(comparison.runs.values())))
    parts = [
        f"{found['machine']}. {seeds} seeds; {setting.prompts} prompts a batch; every arm gets "
        f"{comparison.horizon:.1f} priced seconds ({setting.pricing}), those of {setting.steps} steps of "
        f"GRPO-{setting.many}.",
        "## What was reached\n\n" + ends(comparison),
        "## What it took\n\n" + work(comparison),
        NOTES,
        *(f"## Against {base}\n\n{differences(comparison, base)}" for base in comparison.baselines),
    ]
    if comparison.baselines:
        level = comparison.baselines[0]
        parts.append(
            f"## Priced time to the last Pass@1 of {level}\n\n{levels(comparison, comparison.prices.of, level)}"
        )
        tables = [repriced(comparison, base) for base in comparison.baselines]
        parts.append("## At other prices: mean Pass@1 over the common time\n\n" + "\n\n".join(tables))
    parts.append("## Prices\n\n" + price_table(found))
    if tuning_file(setting).exists():
        parts.append("## Learning rates\n\n" + tuned(setting))
    if (setting.folder / "probe.csv").exists():
        parts.append("## Gradient probe\n\n" + probed(setting.folder / "probe.csv"))
    return "\n\n".join(parts) + "\n"


def ends(comparison: Comparison) -> str:
    clock, end = comparison.prices.of, comparison.horizon
    rows = []
    for arm in comparison.arms:
        rows.append([arm, *(spread(comparison.values(arm, clock, end, name)) for name in ("mean", "first", "any"))])
        if comparison.runs[arm][0].points[-1].longer_first is not None:
            rows[-1] += [spread([getattr(run.points[-1], name) for run in comparison.runs[arm]]) for name in LONGER]
    head = ["arm", "mean Pass@1 over the time", "Pass@1 at the end", "Pass@8", "Pass@1, longer", "Pass@8, longer"]
    return table(head[: len(rows[0])], rows)


LONGER = ("longer_first", "longer_any")


def work(comparison: Comparison) -> str:
    rows = []
    for arm in comparison.arms:
        counts, prices = comparison.mean_counts(arm), comparison.prices
        whole = prices.of(counts)
        positive = fmean(run.points[-1].positive / max(1, run.points[-1].counts.kept) for run in comparison.runs[arm])
        rows.append(
            [
                arm,
                f"{comparison.runs[arm][0].job.rate:g}",
                f"{counts.steps:,}",
                f"{counts.generated:,}",
                f"{counts.updated:,}",
                f"{counts.kept:,}",
                f"{positive:.0%}",
                f"{prices.generated * counts.generated / whole:.0%}",
            ]
        )
    head = ["arm", "rate", "steps", "generated", "forwarded", "kept", "of them with A > 0", "time of generation"]
    return table(head, rows)


def differences(comparison: Comparison, base: str) -> str:
    clock, end = comparison.prices.of, comparison.horizon
    others = [arm for arm in comparison.arms if arm != base]
    rows = []
    for arm in others:
        row = [arm]
        for measure in ("mean", "first", "any"):
            ours, theirs = (comparison.values(name, clock, end, measure) for name in (arm, base))
            row.append(str(paired(ours, theirs, len(others))))
        rows.append(row)
    return table(["arm", "mean Pass@1 over the time", "Pass@1 at the end", "Pass@8 at the end"], rows)


def levels(comparison: Comparison, clock: Clock, base: str) -> str:
    end = comparison.common_end(clock)
    wanted = comparison.values(base, clock, end, "first")
    own = [time_to(run, clock, level) for run, level in zip(comparison.runs[base], wanted, strict=True)]
    rows = []
    for arm in comparison.arms:
        found = [time_to(run, clock, level) for run, level in zip(comparison.runs[arm], wanted, strict=True)]
        inside = [time if time is not None and time <= end else None for time in found]
        times = [f"> {end:.1f}" if time is None else f"{time:.1f}" for time in inside]
        speeds = [0.0 if time is None else mine / max(time, 1e-9) for time, mine in zip(inside, own, strict=True)]
        faster = f"{median(speeds):.2f}x" if median(speeds) else "never"
        rows.append([arm, f"{len(times) - inside.count(None)} of {len(times)}", faster, ", ".join(times)])
    return table(["arm", "seeds that reached it", f"as fast as {base}, median", "seed by seed"], rows)


def repriced(comparison: Comparison, base: str) -> str:
    """Differences of the mean of Pass@1 over the time that all runs have at each pricing."""
    others = [arm for arm in comparison.arms if arm != base]
    rows = []
    for name, prices in comparison.by_name.items():
        end = comparison.common_end(prices.of)
        theirs = comparison.values(base, prices.of, end, "mean")
        ours = [comparison.values(arm, prices.of, end, "mean") for arm in others]
        rows.append([name, *(str(paired(values, theirs, len(others))) for values in ours)])
    return f"Against {base}:\n\n{table(['prices', *others], rows)}"


def price_table(found: dict) -> str:
    names = {
        "generated": "a generated token",
        "scored": "a scored row (its entropy)",
        "updated": "an updated row of the body",
        "kept": "a kept token in the head",
        "steps": "a step of the optimiser",
    }
    prices = table(["piece", "microseconds"], [[names[n], f"{1e6 * s:.3g}"] for n, s in found["seconds"].items()])
    steps = [
        [arm, f"{step['measured']:.3f}", f"{step['priced']:.3f}", f"{step['measured'] / step['priced']:.2f}"]
        for arm, step in found["steps"].items()
    ]
    whole = table(
        ["a whole step, in the middle of the schedule", "measured, s", "priced, s", "measured / priced"], steps
    )
    return f"{prices}\n\n{whole}"


def tuned(setting: Setting) -> str:
    comparison = load(setting, "tuning")
    rates = sorted({run.job.rate for runs in comparison.runs.values() for run in runs})
    rows = []
    for arm in comparison.arms:
        found = {rate: [] for rate in rates}
        for run in comparison.runs[arm]:
            found[run.job.rate].append(mean_until(run, comparison.prices.of, comparison.horizon))
        means = {rate: fmean(values) for rate, values in found.items()}
        best = max(means, key=means.__getitem__)
        rows.append([arm, *(f"**{mean:.3f}**" if rate == best else f"{mean:.3f}" for rate, mean in means.items())])
    text = f"The mean of Pass@1 over priced time, of {len(found[rates[0]])} other seeds; each arm's best is bold."
    return f"{text}\n\n{table(['arm', *(f'{rate:g}' for rate in rates)], rows)}"


def probed(path: Path) -> str:
    rows = []
    found = probing.load(path)
    for one in found:
        first = next(other for other in found if other.level == one.level)
        rows.append(
            [
                f"{one.level:.0%}",
                one.arm,
                f"{one.cosine:.3f}",
                f"{one.cosine_of_mean:.3f}",
                f"{one.signal_to_noise / first.signal_to_noise:.2f}",
                f"{one.per_second / first.per_second:.2f}",
            ]
        )
    halves = ", ".join(f"{one.of_halves:.3f}" for one in found if one.arm == found[0].arm)
    text = (
        f"Cosines with the policy gradient of the mean reward, from {probing.REFERENCE:,} rollouts (between its "
        f"halves: {halves}); signal to noise as a multiple of {found[0].arm}'s. {probing.BATCHES} batches."
    )
    head = ["Pass@1", "arm", "cosine of a batch", "of the mean", "signal to noise", "per priced second"]
    return f"{text}\n\n{table(head, rows)}"


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
