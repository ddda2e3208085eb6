"""Other time axes of the same runs: what the comparison would be if other things were dear."""

from __future__ import annotations

from collections.abc import Mapping

from .ledger import Counts, Prices

# Of Qwen2.5-7B: 0.545e9 of its 7.07e9 weights that multiply are the LM head's. Its forward is a third of both passes.
HEAD_OF_7B = 0.545 / 7.07

# What PODS's authors measured (logs in the repository of arXiv 2504.13818, 187f43b).
# Several GPUs that generate the same: 2.7 steps a minute with training on all rollouts, 6.0 with a quarter of them.
# One GPU that trains on 16 rollouts: 7.5 s a step if it generates these alone, 10.1 s if it generates 64.
# So the generation of a quarter takes more than half of the time of all.
STEPS_OF_ALL, STEPS_OF_QUARTER = 2.7, 6.0
SECONDS_OF_FEW, SECONDS_OF_MANY = 7.5, 10.1

MEASURED, OF_PODS = "as measured", "generation as PODS's authors measured it"
TOKENS_ALONE, ROWS_ALONE = "generated tokens alone", "updated rows alone"  # counts, not seconds


def pricings(measured: Prices, grpo: Counts) -> Mapping[str, Prices]:
    """Prices by name. ``grpo`` is what GRPO with many rollouts did: its update is the unit of the others."""
    of_7b = Prices(
        generated=0.0,
        scored=HEAD_OF_7B / 3 * grpo.updated / grpo.kept,
        updated=1 - HEAD_OF_7B,
        kept=HEAD_OF_7B * grpo.updated / grpo.kept,
        steps=0.0,
    )
    return {
        MEASURED: measured,
        OF_PODS: as_of_pods(measured, grpo),
        "generation at 0.05 of GRPO's update": measured.with_generation_at(0.05, grpo),
        "generation at 0.4 of GRPO's update": measured.with_generation_at(0.4, grpo),
        "generation at 1": measured.with_generation_at(1.0, grpo),
        "generation at 3": measured.with_generation_at(3.0, grpo),
        "a 7B model's head and body, generation at 0.4": of_7b.with_generation_at(0.4, grpo),
        "a 7B model's head and body, generation at 1": of_7b.with_generation_at(1.0, grpo),
        TOKENS_ALONE: Prices(1.0, 0.0, 0.0, 0.0, 0.0),
        ROWS_ALONE: Prices(0.0, 0.0, 1.0, 0.0, 0.0),
    }


def unit(pricing: str) -> str:
    return {TOKENS_ALONE: "generated tokens", ROWS_ALONE: "updated rows"}.get(pricing, "priced seconds")


def as_of_pods(measured: Prices, grpo: Counts) -> Prices:
    """Generation has a price for each step, and one for each token.

    In units of the update of all rollouts, with g for the generation of all and f for that of a quarter:
    (g + 1) / (g + 1/4) = 6.0 / 2.7 and (g + 1/4) / (f + 1/4) = 10.1 / 7.5.
    """
    ratio = STEPS_OF_QUARTER / STEPS_OF_ALL
    of_all = (1 - ratio / 4) / (ratio - 1)
    of_quarter = (of_all + 1 / 4) * SECONDS_OF_FEW / SECONDS_OF_MANY - 1 / 4
    of_tokens = (of_all - of_quarter) / (1 - 1 / 4)
    by_token = measured.with_generation_at(of_tokens, grpo)
    of_step = (of_all - of_tokens) * measured.of_update(grpo) / grpo.steps
    return by_token._replace(steps=measured.steps + of_step)


NAMES = tuple(pricings(Prices(*[1.0] * 5), Counts(*[1] * 5)))
