"""What does selection give for the same time? GRPO, PODS and D3S on chains of sums, or on your model and data.

    python -m experiments.learning all                        # prices, tuning, runs, probe and report; hours
    python -m experiments.learning all --short                # a look at the stages, in a few minutes
    python -m experiments.learning tune run report --model FOLDER --dataset FILE --folder mine

A stage that has run is not repeated, and runs that have ended are kept: after an interruption, give the same command
again. experiments/learning/README.md explains what is compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

if __name__ == "__main__":
    # Before transformers is imported. Nothing is downloaded: the experiment makes its models, and yours is a folder.
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false"
    )

from . import plot, report, stages
from .arms import Arm, arms
from .chains import SLIPS
from .pricings import MEASURED, NAMES
from .setting import Setting

STAGES = ("prices", "tune", "run", "probe", "report")
SEEDS = 8
USERS = {  # defaults with --model
    "prompts": 4, "many": 8, "few": 2, "held_out": 32, "micro_batch": 8, "jobs": 1, "threads": os.cpu_count() or 1,
}  # fmt: skip
SHORT = {
    "enough": 0.0, "prompts": 2, "many": 8, "few": 2, "steps": 2, "evaluations": 1, "held_out": 8,
}  # fmt: skip
SHORT_RATE = 1e-4


def main() -> None:
    begin = time.perf_counter()
    parser = argument_parser()
    given = parser.parse_args()
    setting = setting_of(parser, given)
    chosen = chosen_arms(parser, given.arms, setting)
    try:
        setting.keep()
    except ValueError as error:
        parser.error(str(error))
    wanted = STAGES if "all" in given.stages else given.stages
    if given.short or given.rate:
        wanted = [stage for stage in wanted if stage != "tune"]

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:7.0f} s  {text}", flush=True)

    for stage in wanted:
        do(stage, setting, chosen, range(given.first_seed, given.first_seed + given.seeds), given, say)


def do(
    stage: str,
    setting: Setting,
    chosen: Sequence[Arm],
    seeds: Sequence[int],
    given: argparse.Namespace,
    say: stages.Say,
) -> None:
    stages.price(setting, say)  # every stage needs the prices
    if stage == "tune":
        stages.tune(setting, chosen, say)
    elif stage == "run":
        stages.compare(setting, chosen, seeds, given.rate, say)
    elif stage == "probe" and setting.model is None and not given.short:
        stages.probe(setting, say)
    elif stage == "report":
        text = report.report(setting)
        (setting.folder / "learning.md").write_text(text, encoding="utf-8")
        plot.save(setting, setting.folder / "learning.png")
        say(f"{setting.folder / 'learning.md'}, learning.png\n\n{text}")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m experiments.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="+", choices=[*STAGES, "all"], metavar="STAGE", help=f"{', '.join(STAGES)}, or all")
    add("--folder", type=Path, default=Path("learn"), help="for start models, runs and report (default: learn)")
    add("--short", action="store_true", help="tiny everything, to see that it runs; nothing is tuned or probed")
    add("--model", type=Path, help="folder of a model with its tokenizer; needs --dataset")
    add("--dataset", type=Path, help="lines of JSON with prompt (a text or a conversation) and answer")
    add("--arms", nargs="+", metavar="ARM", help="names of arms, in quotes (default: all with fresh samples)")
    add("--seeds", type=whole(1), default=SEEDS, help=f"how many (default: {SEEDS})")
    add("--first-seed", type=whole(0), default=0, help="seeds count from here (default: 0)")
    add("--rate", type=positive, help="learning rate of all arms, instead of tuned ones")
    for field in fields(Setting):
        if field.type == "int":
            default = f"default: {field.default}" + (
                f"; with --model {USERS[field.name]}" if field.name in USERS else ""
            )
            add(f"--{field.name.replace('_', '-')}", type=whole(1), help=f"{HELP[field.name]} ({default})")
    add("--rates", type=positive, nargs="+", help=f"{HELP['rates']} (default: {' '.join(map(str, Setting.rates))})")
    add("--enough", type=share, help=f"{HELP['enough']} (default: {Setting.enough})")
    add("--slips", type=positive, help=f"{HELP['slips']} (default: {Setting.slips:g})")
    add("--strict", action="store_true", help=HELP["strict"])
    add(
        "--pricing",
        choices=list(NAMES),
        default=MEASURED,
        metavar="NAME",
        help=f"{HELP['pricing']}: {'; '.join(NAMES)}",
    )
    add("--micro-batch", type=whole(1), help=f"{HELP['micro_batch']} (default: all; with --model 8)")
    return parser


HELP = {
    "rates": "the first learning rates that are tried, of every arm",
    "enough": "Pass@1 at which the supervised training of the start model ends",
    "slips": "a factor of the slips in the work that the start model learns from",
    "strict": "a chain is right only if all of its steps are",
    "pricing": "the prices that determine how long a run lasts, in quotes",
    "prompts": "prompts of a batch",
    "many": "rollouts of a prompt",
    "few": "of them, those that are trained on, or that GRPO generates where it generates few",
    "steps": "steps of GRPO with many rollouts, whose priced time every arm gets",
    "evaluations": "after that of the start model",
    "held_out": "prompts of an evaluation",
    "longest": "tokens of a completion of your model",
    "micro_batch": "rollouts of which all activations are held at once, and whose tokens are chosen together",
    "threads": "of each run",
    "jobs": "runs at a time",
}


def setting_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Setting:
    if (given.model is None) != (given.dataset is None):
        there, lacks = ("--model", "--dataset") if given.dataset is None else ("--dataset", "--model")
        parser.error(f"{there}: needs {lacks} too")
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: {given.model} has no config.json; takes the folder of a saved model")
    if given.dataset is not None and not given.dataset.is_file():
        parser.error(f"--dataset: there is no file {given.dataset}")
    names = {field.name for field in fields(Setting)}
    chosen = {name: value for name, value in vars(given).items() if name in names and value is not None}
    if given.rates:
        chosen["rates"] = tuple(given.rates)
    setting = Setting(**(USERS if given.model else {}) | (SHORT if given.short else {}) | chosen)
    if setting.few > setting.many:
        parser.error(f"--few: got {setting.few}; takes at most --many, {setting.many}")
    if setting.slips * max(SLIPS.values()) > 1:
        parser.error(f"--slips: got {setting.slips:g}; takes at most {1 / max(SLIPS.values()):.3g}, where all slip")
    if given.short and given.rate is None:
        given.rate = SHORT_RATE
    try:
        setting.problem()
    except ValueError as error:
        parser.error(str(error))
    return setting


def chosen_arms(parser: argparse.ArgumentParser, names: Sequence[str] | None, setting: Setting) -> list[Arm]:
    every = arms(setting.many, setting.few)
    unknown = sorted(set(names or ()) - set(every))
    if unknown:
        parser.error(f"--arms: got {', '.join(unknown)}; takes some of: {'; '.join(every)}")
    return [arm for name, arm in every.items() if (name in names if names else not arm.staleness)]


def whole(least: int):
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}; takes a whole number of at least {least}")
        return int(text)

    return parse


def positive(text: str, most: float = sys.float_info.max, taken: str = "a number above 0") -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        raise argparse.ArgumentTypeError(f"got {text}; takes {taken}")
    return number


def share(text: str) -> float:
    return positive(text, 1.0, "a share above 0, up to 1")


if __name__ == "__main__":
    main()
