"""Does a model learn as well from the rollouts and tokens that D3S keeps? A comparison with GRPO, PODS and GSPO.

Trains a small Qwen2 that can partly add, with TRL. The arms differ in the rollouts, tokens and loss that they train
with, and in their tuned learning rate; all else is equal. Run `make learn`, or `--short` for a first look. With --model
and --dataset the arms train your model instead.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import _learn_quiet
from _learn_arms import arms
from _learn_setting import Setting

# Defaults of the options. With the example's own task a run takes about 20 seconds on one core.
OWN_TASK = {
    "steps": 100,
    "prompts": 12,
    "group": 16,
    "micro_batch": None,  # all rollouts of a step in one forward
    "completion": 16,  # tokens of a careful answer, including <eos>
    "held_out": 1024,
    "evaluate_every": 10,
    "learning_rates": [2e-4, 4e-4, 8e-4],
}
USERS_TASK = {
    "steps": 100,
    "prompts": 8,
    "group": 16,
    "micro_batch": 8,
    "completion": 512,
    "held_out": 128,
    "evaluate_every": 20,
    "learning_rates": [5e-7, 1e-6, 2e-6],
}
SHORT = {"arms": ["GRPO", "PODS", "D3S"], "seeds": 2, "learning_rates": []}
STEPS_PER_BATCH = 2  # the second is off-policy, so that ratios and clipping have an effect
WARM_UP_STEPS = 450  # leads to a pass rate of about 20 %
FIRST_TUNING_SEED = 1000  # evaluation seeds count from 0


def main() -> None:
    parser = argument_parser()
    given = parser.parse_args()
    chosen = with_defaults(given)
    check(parser, chosen)
    _learn_quiet.prepare(chosen.threads)
    from _learn_compare import Plan, compare  # imported here: --help does not need numpy, rich, matplotlib
    from _learn_files import save_curves
    from _learn_plot import save_plot
    from _learn_report import report
    from _learn_workers import Failed
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False)
    begin = time.perf_counter()
    plan = Plan(tuple(chosen.arms), tuple(chosen.learning_rates), tuple(chosen.tuning_seeds), tuple(chosen.seeds))
    with TemporaryDirectory() as work:
        setting = setting_of(chosen, Path(work))
        if setting.model is not None:
            check_dataset(parser, setting)
        try:
            comparison = compare(setting, plan, console)
        except Failed as error:
            console.print(str(error), markup=False, soft_wrap=True)
            raise SystemExit(1) from None

    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    save_curves(out / "curves.csv", comparison.runs)
    if comparison.tuning:
        save_curves(out / "tuning.csv", comparison.tuning)
    save_plot(out / "learning.png", comparison)
    text = report(setting, comparison)
    (out / "learning.md").write_text(text)
    console.print(Markdown(text))
    console.print(f"\n{(time.perf_counter() - begin) / 60:.1f} minutes. Curves, plot and tables: {out}/")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [arm.name for arm in arms(OWN_TASK["group"])]
    add("--out", type=Path, default=Path("learn"), help="folder for the CSV files, plot and tables (default: learn)")
    add("--short", action="store_true", help="three arms, two seeds, learning rates that a full run found")
    add("--model", type=Path, help="folder of a model with its tokenizer; needs --dataset")
    add("--dataset", type=Path, help="JSON, JSONL or Parquet file with the columns prompt and answer")
    add("--arms", nargs="+", choices=names, metavar="ARM", help=f"some of: {'; '.join(names)} (default: all)")
    add("--seeds", type=whole(1), help="how many to evaluate on (default: 5)")
    add("--tuning-seeds", type=whole(1), default=2, help="how many to tune learning rates on (default: 2)")
    add(
        "--learning-rates",
        nargs="+",
        type=positive,
        metavar="RATE",
        help=default("learning_rates", "tried for each arm; a single one is not tuned"),
    )
    add("--steps", type=whole(1), help=default("steps", "of the optimiser"))
    add("--prompts", type=whole(1), help=default("prompts", "of a generation batch"))
    add("--group", type=whole(2), help=default("group", "rollouts of a prompt"))
    add("--micro-batch", type=whole(1), help=default("micro_batch", "rollouts in one forward"))
    add("--completion", type=whole(1), help=default("completion", "tokens of a completion at most"))
    add("--held-out", type=whole(1), help=default("held_out", "prompts of an evaluation"))
    add("--evaluate-every", type=whole(1), help=default("evaluate_every", "steps between evaluations"))
    add("--jobs", type=whole(1), help="runs at a time (default: 2; 1 with --model)")
    add("--threads", type=whole(1), default=1, help="of each run (default: 1)")
    return parser


def default(name: str, text: str) -> str:
    own, users = (
        " ".join(map(str, value)) if isinstance(value, list) else value or "all of a step"
        for value in (OWN_TASK[name], USERS_TASK[name])
    )
    return f"{text} (default: {own})" if own == users else f"{text} (default: {own}; with --model {users})"


def whole(least: int):
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"got {text}; takes a whole number of at least {least}")
        return number

    return parse


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}; takes a number above 0")
    return number


def with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    own = given.model is None
    defaults = {"arms": None, "seeds": 5, "jobs": 2 if own else 1, **(OWN_TASK if own else USERS_TASK)}
    if given.short:
        defaults |= SHORT
    values = vars(given) | {name: value for name, value in defaults.items() if getattr(given, name) is None}
    if values["micro_batch"] is None:
        values["micro_batch"] = max(1, values["prompts"] * values["group"] // STEPS_PER_BATCH)
    every_arm = arms(values["group"])
    values["arms"] = [arm for arm in every_arm if values["arms"] is None or arm.name in values["arms"]]
    values["seeds"] = range(values["seeds"])
    tunes = len(values["learning_rates"]) > 1
    values["tuning_seeds"] = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + values["tuning_seeds"] * tunes)
    return argparse.Namespace(**values)


def check(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Checks what argparse cannot check; exits with a message that names the argument."""
    if (chosen.model is None) != (chosen.dataset is None):
        there, lacks = ("--model", "--dataset") if chosen.dataset is None else ("--dataset", "--model")
        parser.error(f"{there}: needs {lacks} too")
    if chosen.model is not None and not (chosen.model / "config.json").is_file():
        parser.error(f"--model: {chosen.model} has no config.json; takes the folder of a saved model")
    if chosen.dataset is not None and chosen.dataset.suffix not in (".json", ".jsonl", ".parquet"):
        parser.error(f"--dataset: got {chosen.dataset}; takes a .json, .jsonl or .parquet file")
    if chosen.dataset is not None and not chosen.dataset.is_file():
        parser.error(f"--dataset: there is no file {chosen.dataset}")
    if chosen.model is not None and not chosen.learning_rates:
        parser.error("--learning-rates: those that --short knows are for the example's own task; takes at least one")
    rollouts = chosen.prompts * chosen.group
    if rollouts % STEPS_PER_BATCH:
        parser.error(f"--prompts, --group: got {chosen.prompts} x {chosen.group}; takes an even number of rollouts")
    if rollouts % (STEPS_PER_BATCH * chosen.micro_batch):
        parser.error(
            f"--micro-batch: got {chosen.micro_batch}; takes a divisor of {rollouts // STEPS_PER_BATCH}, the rollouts "
            f"of an optimiser step (--prompts {chosen.prompts} x --group {chosen.group} / {STEPS_PER_BATCH})"
        )
    if chosen.out.exists() and not chosen.out.is_dir():
        parser.error(f"--out: {chosen.out} is not a folder")


def check_dataset(parser: argparse.ArgumentParser, setting: Setting) -> None:
    from _learn_problem import problem

    _learn_quiet.silence()
    try:
        problem(setting)
    except ValueError as error:
        parser.error(str(error))


def setting_of(chosen: argparse.Namespace, work: Path) -> Setting:
    return Setting(
        work=work,
        model=chosen.model,
        dataset=chosen.dataset,
        steps=chosen.steps,
        group=chosen.group,
        prompts=chosen.prompts,
        steps_per_batch=STEPS_PER_BATCH,
        micro_batch=chosen.micro_batch,
        completion=chosen.completion,
        held_out=chosen.held_out,
        evaluate_every=chosen.evaluate_every,
        warm_up_steps=WARM_UP_STEPS,
        jobs=chosen.jobs,
        threads=chosen.threads,
    )


if __name__ == "__main__":
    main()
