"""Other time axes of the same runs: what the comparison would be if other things were dear."""

from __future__ import annotations

from collections.abc import Mapping

from .ledger import Counts, Prices

# Of Qwen2.5-7B: 0.545e9 of its 7.07e9 weights that multiply are the LM head's. Its forward is a third of both passes.
HEAD_OF_7B = 0.545 / 7.07


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
        "as measured": measured,
        "generation at 0.4 of GRPO's update": measured.with_generation_at(0.4, grpo),
        "generation at 1": measured.with_generation_at(1.0, grpo),
        "generation at 3": measured.with_generation_at(3.0, grpo),
        "a 7B model's head and body, generation at 0.4": of_7b.with_generation_at(0.4, grpo),
        "a 7B model's head and body, generation at 1": of_7b.with_generation_at(1.0, grpo),
        "generated tokens alone": Prices(1.0, 0.0, 0.0, 0.0, 0.0),
        "updated rows alone": Prices(0.0, 0.0, 1.0, 0.0, 0.0),
    }
