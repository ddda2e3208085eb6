"""Which tokens does D3S train on? By what they are for in the task of learn_more_with_less.py, as training goes on.

An answer is "well work 7 8 1 5 , 4 3 0 8 = 0 8 5": a first word that is free, the method, sums among copied digits, and
the result. Only the method and the digits decide the reward.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import _learn_quiet

UNTIL = (20, 50, 100)  # steps
KINDS = ("first word", "method", "sum", "copied digit", "result", "other")
SUMS = {3, 4, 8, 9}  # places after the method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", default="D3S", help="of learn_more_with_less.py, one that chooses tokens")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    _learn_quiet.prepare(1)
    from _learn_arms import arms
    from _learn_problem import problem, warm_up
    from _learn_run import new_trainer
    from _learn_setting import Job
    from learn_more_with_less import argument_parser, setting_of, with_defaults

    _learn_quiet.silence()
    arm = next((arm for arm in arms(16) if arm.name == given.arm and arm.d3s), None)
    if arm is None:
        parser.error(f"--arm: got {given.arm}; takes one of {', '.join(arm.name for arm in arms(16) if arm.d3s)}")
    with TemporaryDirectory() as work:
        setting = setting_of(with_defaults(argument_parser().parse_args([])), Path(work))
        warm_up(setting, given.seed, lambda _: None)
        own = problem(setting)
        trainer = new_trainer(setting, arm, Job(arm.name, arm.learning_rate, given.seed), own)
        count(trainer, own.tokenizer)
        trainer.train()


def count(trainer: Any, tokenizer: Any) -> None:
    """Has the trainer print, at some steps, the share of each kind of token among all and among the kept ones."""
    everything: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    compute_loss, generate = trainer._compute_loss, trainer._generate_and_score_completions

    def counted(model: Any, inputs: dict[str, Any]) -> Any:
        for row, mask, chosen in zip(
            inputs["completion_ids"], inputs["completion_mask"].bool(), inputs["d3s_kept"], strict=True
        ):
            kinds = kinds_of(tokenizer.convert_ids_to_tokens(row[mask].tolist()))
            everything.update(kinds)
            kept.update(kind for kind, was in zip(kinds, chosen[mask].tolist(), strict=True) if was)
        return compute_loss(model, inputs)

    def told(inputs: Any) -> Any:
        if trainer.state.global_step in UNTIL:
            tell(trainer.state.global_step, everything, kept)
        return generate(inputs)

    trainer._compute_loss, trainer._generate_and_score_completions = counted, told
    trainer.args.max_steps += 2  # for what is told before the next generation


def tell(step: int, everything: Counter[str], kept: Counter[str]) -> None:
    print(f"to step {step}: " + "; ".join(
        f"{kind} {everything[kind] / everything.total():.0%} of the tokens, {kept[kind] / kept.total():.0%} of the kept"
        for kind in KINDS
    ), flush=True)  # fmt: skip
    everything.clear()
    kept.clear()


def kinds_of(words: list[str]) -> list[str]:
    method = next((place for place, word in enumerate(words) if word in ("work", "guess")), len(words))
    result = words.index("=") if "=" in words else len(words)

    def kind(place: int, word: str) -> str:
        if place == 0:
            return "first word"
        if place == method:
            return "method"
        if place > result:
            return "result"
        if word.isdigit() and place > method:
            return "sum" if place - method in SUMS else "copied digit"
        return "other"

    return [kind(place, word) for place, word in enumerate(words)]


if __name__ == "__main__":
    main()
