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
MEASURES = {"mean": "mean Pass@1 over the time", "first": "Pass@1 at the end", "any": "Pass@8 at the end"}
LONGER = ("longer_first", "longer_any")


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
        f"# Results: {setting.folder.name.replace('_', ' ')}",
        f"{found['machine']}. {seeds} seeds; prompts of a batch: {setting.prompts}; every arm gets "
        f"{comparison.horizon:.1f} priced seconds ({setting.pricing}), those of {setting.steps} steps of "
        f"GRPO-{setting.many}.",
        "## What was reached\n\n" + ends(comparison),
        "## What it took\n\n" + work(comparison),
        NOTES,
        *(f"## Against {base}\n\n{differences(comparison, base)}" for base in comparison.baselines),
    ]
    if piece_pairs(setting, comparison):
        parts.append("## What each piece adds\n\n" + pieces(setting, comparison))
    if comparison.baselines:
        level = comparison.baselines[0]
        parts.append(
            f"## Priced time to the last Pass@1 of {level}\n\n{levels(comparison, comparison.prices.of, level)}"
        )
        parts.append("## At other prices\n\n" + repriced(comparison))
    parts.append("## Prices\n\n" + price_table(found))
    if tuning_file(setting).exists():
        parts.append("## Learning rates\n\n" + tuned(setting))
    if (setting.folder / "probe.csv").exists():
        parts.append("## Gradient probe\n\n" + probed(setting.folder / "probe.csv"))
    return "\n\n".join(parts) + "\n"


def ends(comparison: Comparison) -> str:
    clock, end = comparison.prices.of, comparison.horizon
    rows, longer = [], []
    for arm in comparison.arms:
        rows.append([arm, *(spread(comparison.values(arm, clock, end, measure)) for measure in MEASURES)])
        if comparison.runs[arm][0].points[-1].longer_first is not None:
            lasts = [run.points[-1] for run in comparison.runs[arm]]
            longer.append([arm, *(spread([getattr(last, name) for last in lasts]) for name in LONGER)])
    tables = [table(["arm", *MEASURES.values()], rows)]
    if longer:
        tables.append(table(["arm", "Pass@1 of longer chains", "Pass@8 of longer chains"], longer))
    return "\n\n".join(tables)


def work(comparison: Comparison) -> str:
    done, shares = [], []
    for arm, runs in comparison.runs.items():
        counts, prices = comparison.mean_counts(arm), comparison.prices
        positive = fmean(run.points[-1].positive / max(1, run.points[-1].counts.kept) for run in runs)
        done.append([arm, *(f"{n:,}" for n in (counts.steps, counts.generated, counts.updated, counts.kept))])
        generation = prices.generated * counts.generated / prices.of(counts)
        shares.append([arm, f"{runs[0].job.rate:g}", f"{positive:.0%}", f"{generation:.0%}"])
    return (
        table(["arm", "steps", "tokens generated", "rows forwarded", "tokens kept"], done)
        + "\n\n"
        + table(["arm", "learning rate", "kept tokens with A > 0", "time of generation"], shares)
    )


def differences(comparison: Comparison, base: str) -> str:
    others = [arm for arm in comparison.arms if arm != base]
    rows = [[arm, *apart(comparison, arm, base, len(others))] for arm in others]
    return table(["arm", *MEASURES.values()], rows)


def apart(comparison: Comparison, arm: str, base: str, comparisons: int) -> list[str]:
    """How far the arm is from another, in each measure."""
    clock, end = comparison.prices.of, comparison.horizon
    values = ([comparison.values(name, clock, end, measure) for name in (arm, base)] for measure in MEASURES)
    return [str(paired(ours, theirs, comparisons)) for ours, theirs in values]


def pieces(setting: Setting, comparison: Comparison) -> str:
    pairs = piece_pairs(setting, comparison)
    rows = [[f"{arm}, against {base}", *apart(comparison, arm, base, len(pairs))] for arm, base in pairs]
    return table(["what is added", *MEASURES.values()], rows)


def piece_pairs(setting: Setting, comparison: Comparison) -> list[tuple[str, str]]:
    """Arms that differ in one thing: the rule for rollouts, tokens at all, the rule for tokens."""
    found = [
        ("PODS", f"random {setting.few} of {setting.many}"),
        ("D3S", "D3S, rollouts alone"),
        ("D3S", "D3S, random tokens"),
    ]
    return [(arm, base) for arm, base in found if {arm, base} <= set(comparison.arms)]


def levels(comparison: Comparison, clock: Clock, base: str) -> str:
    end = comparison.common_end(clock)
    latest = end * (1 + 1e-9)  # a level at the end itself is reached, whatever the rounding
    wanted = comparison.values(base, clock, end, "first")
    own = [time_to(run, clock, level) for run, level in zip(comparison.runs[base], wanted, strict=True)]
    rows = []
    for arm in comparison.arms:
        found = [time_to(run, clock, level) for run, level in zip(comparison.runs[arm], wanted, strict=True)]
        inside = [time if time is not None and time <= latest else None for time in found]
        times = [f"> {end:.1f}" if time is None else f"{time:.1f}" for time in inside]
        speeds = [0.0 if time is None else mine / max(time, 1e-9) for time, mine in zip(inside, own, strict=True)]
        count = len(times) - inside.count(None)
        faster = f"{median(speeds):.2f}x" if count > len(times) / 2 else "not reached by most"
        rows.append([arm, f"{count} of {len(times)}", faster, ", ".join(times)])
    return table(["arm", "seeds that reached it", f"as fast as {base}, median", "seed by seed"], rows)


def repriced(comparison: Comparison) -> str:
    """Differences of the mean of Pass@1 over the time that all runs have at each pricing."""
    rows = []
    for name, prices in comparison.by_name.items():
        end = comparison.common_end(prices.of)
        means = {arm: comparison.values(arm, prices.of, end, "mean") for arm in comparison.arms}
        for arm in comparison.arms:
            if arm not in comparison.baselines:
                against = (paired(means[arm], means[base], len(means) - 1) for base in comparison.baselines)
                rows.append([name, arm, *map(str, against)])
    text = "Differences of the mean of Pass@1 over the time that all runs have."
    return f"{text}\n\n{table(['prices', 'arm', *(f'against {base}' for base in comparison.baselines)], rows)}"


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
    found = probing.load(path)
    first = {one.level: one for one in reversed(found)}
    halves = ", ".join(f"{one.of_halves:.3f} at {level:.0%}" for level, one in sorted(first.items()))
    parts = [
        f"Cosines with the policy gradient of the mean reward, from {probing.REFERENCE:,} rollouts (between its "
        f"halves: {halves}); signal to noise as a multiple of {found[0].arm}'s. {probing.BATCHES} batches."
    ]
    for level, base in sorted(first.items()):
        rows = [
            [
                one.arm,
                f"{one.cosine:.3f}",
                f"{one.cosine_of_mean:.3f}",
                f"{one.signal_to_noise / base.signal_to_noise:.2f}",
                f"{one.per_second / base.per_second:.2f}",
            ]
            for one in found
            if one.level == level
        ]
        head = ["arm", "cosine of a batch", "of the mean", "signal to noise", "per priced second"]
        parts.append(f"### At a Pass@1 of {level:.0%}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
