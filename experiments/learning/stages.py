"""The stages of the experiment. Each leaves files in the setting's folder, and does not repeat what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from . import policy, prices, records
from . import probe as probing
from .arms import Arm, arms
from .ledger import Counts, Prices
from .pricings import pricings
from .records import Run
from .run import Job, train
from .setting import Setting
from .statistics import mean_until
from .workers import results

TUNING_SEEDS = range(1000, 1002)
TUNING_EVALUATIONS = 4
FACTOR, MOST_RATES = 2.0, 6  # how the grid grows at an edge
Say = Callable[[str], None]


def start_models(setting: Setting, seeds: Sequence[int], say: Say) -> None:
    missing = [] if setting.model else [seed for seed in seeds if not (setting.start(seed) / "config.json").exists()]
    for seed, _ in results(setting, make_start_model, missing):
        say(f"start model of seed {seed}")


def make_start_model(setting: Setting, seed: int) -> None:
    model = policy.warm_up(setting.problem(), seed, setting.enough, setting.slips)
    model.save_pretrained(setting.start(seed))


# ---- prices ----------------------------------------------------------------------------------------------------------


def price(setting: Setting, say: Say) -> None:
    """Measures the prices in one process, while no other runs."""
    path = setting.folder / "prices.json"
    if path.exists():
        return
    start_models(setting, TUNING_SEEDS[:1], say)
    alone = replace(setting, jobs=1)
    ((_, found),) = results(alone, measure_prices, [TUNING_SEEDS[0]])
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    say(f"prices: {found['seconds']}")


def measure_prices(setting: Setting, seed: int) -> dict[str, object]:
    problem, model = setting.problem(), policy.load(setting.start(seed))
    found = prices.measure(model, problem, setting)
    steps = {}
    for arm in arms(setting.many, setting.few).values():
        measured, counts = prices.whole_step(model, problem, setting, arm)
        seconds = {"measured": measured / counts.steps, "priced": found.of(counts) / counts.steps}
        steps[arm.name] = seconds | {"counts": counts._asdict()}
    return {"machine": prices.machine(model.device), "seconds": found._asdict(), "steps": steps}


def known_prices(setting: Setting) -> tuple[Prices, float]:
    """The prices, and the priced time that every arm gets: that of so many of GRPO's steps with many rollouts."""
    grpo = Counts(**prices_file(setting)["steps"][f"GRPO-{setting.many}"]["counts"])
    prices = pricings(measured_prices(setting), grpo)[setting.pricing]
    return prices, setting.steps * prices.of(grpo) / grpo.steps


def measured_prices(setting: Setting) -> Prices:
    return Prices(**prices_file(setting)["seconds"])


def prices_file(setting: Setting) -> dict[str, Any]:
    return json.loads((setting.folder / "prices.json").read_text(encoding="utf-8"))


# ---- runs ------------------------------------------------------------------------------------------------------------


def make(setting: Setting, path: Path, jobs: Sequence[Job], say: Say) -> None:
    """Makes the runs that the file lacks, and adds each to it as soon as it has ended."""
    start_models(setting, sorted({job.seed for job in jobs}), say)
    done = {run.job for run in records.load(path)}
    missing = [job for job in jobs if job not in done]
    for number, (job, run) in enumerate(results(setting, make_run, missing), 1):
        records.append(path, run)
        say(f"{number} of {len(missing)}: {job}: Pass@1 {run.points[0].first:.3f} -> {run.points[-1].first:.3f}")


def make_run(setting: Setting, job: Job) -> Run:
    found, horizon = known_prices(setting)
    arm = arms(setting.many, setting.few)[job.arm]
    model = policy.load(setting.start(job.seed))
    return Run(job, train(setting, setting.problem(), model, arm, job, found, horizon))


def tune(setting: Setting, chosen: Sequence[Arm], say: Say) -> None:
    """Tries a grid of learning rates, which grows for all arms while the best of one is at its edge."""
    quick = replace(setting, evaluations=TUNING_EVALUATIONS)
    rates = sorted(setting.rates)
    while True:
        jobs = [Job(arm.name, rate, seed) for rate in rates for seed in TUNING_SEEDS for arm in chosen]
        make(quick, tuning_file(setting), jobs, say)
        best = set(best_rates(setting).values())
        if len(rates) >= MOST_RATES or not best & {rates[0], rates[-1]}:
            return
        rates = [rates[0] / FACTOR] * (rates[0] in best) + rates + [rates[-1] * FACTOR] * (rates[-1] in best)


def best_rates(setting: Setting) -> dict[str, float]:
    """Of each arm, the learning rate with the highest mean of Pass@1 over priced time."""
    found, horizon = known_prices(setting)
    quality: dict[str, dict[float, list[float]]] = {}
    for run in records.load(tuning_file(setting)):
        of_rate = quality.setdefault(run.job.arm, {}).setdefault(run.job.rate, [])
        of_rate.append(mean_until(run, found.of, horizon))
    return {arm: max(of_arm, key=lambda rate: fmean(of_arm[rate])) for arm, of_arm in quality.items()}


def tuning_file(setting: Setting) -> Path:
    return setting.folder / "tuning.csv"


def compare(
    setting: Setting, chosen: Sequence[Arm], seeds: Sequence[int], rate: float | None, say: Say, name: str = "curves"
) -> None:
    """The runs that are compared, each arm at its own learning rate, or all at ``rate``."""
    own = {} if rate else best_rates(setting)
    jobs = [Job(arm.name, rate or own[arm.name], seed) for seed in seeds for arm in chosen]
    make(setting, setting.folder / f"{name}.csv", jobs, say)


# ---- probe -----------------------------------------------------------------------------------------------------------


def probe(setting: Setting, say: Say) -> None:
    path = setting.folder / "probe.csv"
    if path.exists():
        return
    if not all(probing.exists(setting, level) for level in probing.LEVELS):
        for _ in results(setting, make_probe_models, [0]):
            say("models to probe")
    found = []
    for level, probed in results(setting, probe_level, list(probing.LEVELS)):
        found += probed
        say(f"probed at Pass@1 {level:g}")
    probing.save(path, sorted(found, key=lambda one: one.level))


def make_probe_models(setting: Setting, _: int) -> None:
    probing.make_models(setting)


def probe_level(setting: Setting, level: float) -> list[probing.Probed]:
    model = policy.load(probing.folder(setting, level))
    return probing.probe(setting, setting.problem(), model, level, known_prices(setting)[0])
