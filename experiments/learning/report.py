"""The tables of the report, in Markdown. Every number in them was computed from the files of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from . import probe as probing
from .arms import STALENESS
from .comparison import LONGER, MEASURES, WHOLE_STEPS, Comparison, load
from .pricings import MEASURED, unit
from .setting import Setting
from .stages import prices_file, tuning_file
from .statistics import CONFIDENCE, mean_until, paired, time_to

NOTES = (
    "In the tables above, ± is the standard deviation over seeds. From here on it is the half-width of an interval "
    f"(Student's t, paired by seed) that holds with {CONFIDENCE:.0%} for all rows of a column together (Bonferroni). "
    "Nothing is corrected for the number of columns, tables and prices. * marks a difference larger than its interval."
)


def report(setting: Setting, name: str = "curves") -> str:
    comparison = load(setting, name)
    found = prices_file(setting)
    seeds = len(next(iter(comparison.runs.values())))
    parts = [
        f"# Results: {setting.folder.name.replace('_', ' ')}",
        f"{seeds} seeds; prompts of a batch: {setting.prompts}; every arm gets {comparison.horizon:.1f} "
        f"{unit(setting.pricing)} ({setting.pricing}): those of {setting.steps} steps of GRPO-{setting.many} on the "
        f"prompts that prices were measured on. Prices were measured on {found['machine']}.",
        "## What was reached\n\n" + ends(comparison),
        "## What it took\n\n" + work(comparison),
        NOTES,
        *(f"## Against {base}\n\n{differences(comparison, base)}" for base in comparison.baselines),
    ]
    if piece_pairs(setting, comparison):
        parts.append("## What each piece adds\n\n" + pieces(setting, comparison))
    if comparison.baselines:
        level = comparison.baselines[0]
        parts.append(f"## Priced time to the last Pass@1 of {level}\n\n{levels(comparison, setting.pricing, level)}")
        if setting.pricing == MEASURED:
            parts.append(f"## The same by {WHOLE_STEPS}\n\n{levels(comparison, WHOLE_STEPS, level)}")
        parts.append("## At other prices\n\n" + repriced(comparison))
    parts.append("## Prices\n\n" + price_table(found))
    if tuning_file(setting).exists():
        parts.append("## Learning rates\n\n" + tuned(setting))
    if (setting.folder / "probe.csv").exists():
        parts.append("## Gradient probe\n\n" + probed(setting.folder / "probe.csv"))
    return "\n\n".join(parts) + "\n"


def ends(comparison: Comparison) -> str:
    tables = [MEASURES, LONGER] if comparison.has_longer else [MEASURES]
    return "\n\n".join(
        table(
            ["arm", *measures.values()],
            [[arm, *(spread(at_the_end(comparison, arm, measure)) for measure in measures)] for arm in comparison.arms],
        )
        for measures in tables
    )


def at_the_end(comparison: Comparison, arm: str, measure: str) -> list[float]:
    return comparison.values(arm, comparison.own_clocks, comparison.horizon, measure)


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
    measures = compared(comparison)
    rows = [[arm, *apart(comparison, arm, base, len(others))] for arm in others]
    return table(["arm", *measures.values()], rows)


def compared(comparison: Comparison) -> dict[str, str]:
    return MEASURES | ({"longer_any": LONGER["longer_any"]} if comparison.has_longer else {})


def apart(comparison: Comparison, arm: str, base: str, comparisons: int) -> list[str]:
    """How far the arm is from another, in each measure."""
    return [
        str(paired(*(at_the_end(comparison, name, measure) for name in (arm, base)), comparisons))
        for measure in compared(comparison)
    ]


def pieces(setting: Setting, comparison: Comparison) -> str:
    pairs = piece_pairs(setting, comparison)
    rows = [[f"{arm}, against {base}", *apart(comparison, arm, base, len(pairs))] for arm, base in pairs]
    return table(["what is added", *compared(comparison).values()], rows)


def piece_pairs(setting: Setting, comparison: Comparison) -> list[tuple[str, str]]:
    """Arms that differ in one thing: the rule for rollouts, tokens at all, the rule for tokens, how old samples are."""
    many, few = f"GRPO-{setting.many}", f"GRPO-{setting.few}"
    old = {arm: f"{arm}, {STALENESS} old" for arm in (many, few, "PODS", "D3S, rollouts alone")}
    found = [
        ("PODS", f"random {setting.few} of {setting.many}"),
        ("D3S", "D3S, rollouts alone"),
        ("D3S", "D3S, random tokens"),
        ("NAT, prefixes", "NAT, random tokens"),
        *((aged, arm) for arm, aged in old.items()),
        *((old["PODS"], old[base]) for base in (many, few)),
        (old["D3S, rollouts alone"], old[many]),
        (f"{old[many]}, IcePop", old[many]),
    ]
    return [(arm, base) for arm, base in found if {arm, base} <= set(comparison.arms)]


def levels(comparison: Comparison, pricing: str, base: str) -> str:
    clocks = comparison.clocks[pricing]
    end = comparison.common_end(clocks)
    latest = end * (1 + 1e-9)  # a level at the end itself is reached, whatever the rounding
    wanted = comparison.values(base, clocks, end, "first")

    def times_of(arm: str) -> list[float | None]:
        found = [time_to(run, clocks[arm], level) for run, level in zip(comparison.runs[arm], wanted, strict=True)]
        return [time if time is not None and time <= latest else None for time in found]

    rows, own = [], times_of(base)
    for arm in comparison.arms:
        found = times_of(arm)
        times = [f"> {end:.1f}" if time is None else f"{time:.1f}" for time in found]
        speeds = [0.0 if time is None else mine / max(time, 1e-9) for time, mine in zip(found, own, strict=True)]
        count = len(times) - found.count(None)
        faster = f"{median(speeds):.2f}x" if count > len(times) / 2 else "not reached by most"
        rows.append([arm, f"{count} of {len(times)}", faster, ", ".join(times)])
    return table(["arm", "seeds that reached it", f"as fast as {base}, median", "seed by seed"], rows)


def repriced(comparison: Comparison) -> str:
    """Differences of the mean of Pass@1 over the time that all runs have at each pricing."""
    rows = []
    for name, clocks in comparison.clocks.items():
        end = comparison.common_end(clocks)
        means = {arm: comparison.values(arm, clocks, end, "mean") for arm in comparison.arms}
        for arm in comparison.arms:
            if arm != comparison.baselines[0]:
                against = (means[base] if base != arm else None for base in comparison.baselines)
                rows.append([name, arm, *(at_one_price(means[arm], base, comparison) for base in against)])
    text = (
        "Differences of the mean of Pass@1 over the time that all runs have. † marks a difference that is larger than "
        "its interval also if this is corrected for the number of prices."
    )
    return f"{text}\n\n{table(['prices', 'arm', *(f'against {base}' for base in comparison.baselines)], rows)}"


def at_one_price(ours: Sequence[float], theirs: Sequence[float] | None, comparison: Comparison) -> str:
    if theirs is None:
        return ""
    others = len(comparison.arms) - 1
    at_all_prices = paired(ours, theirs, others * len(comparison.clocks))
    return str(paired(ours, theirs, others)) + " †" * at_all_prices.decided


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
            found[run.job.rate].append(mean_until(run, comparison.own_clocks[arm], comparison.horizon))
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
