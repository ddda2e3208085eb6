"""Draws the pictures of docs/methods.md: the library's choices from one small batch, with each method."""

from __future__ import annotations

import argparse
from pathlib import Path

from plan import draw_plan
from ratios import draw_ratios
from rollouts import draw_advantages, draw_rollouts
from schedule import draw_schedule
from tokens import draw_tokens

PICTURES = {
    "rollouts.png": draw_rollouts,
    "advantages.png": draw_advantages,
    "tokens.png": draw_tokens,
    "schedule.png": draw_schedule,
    "ratios.png": draw_ratios,
    "plan.png": draw_plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    docs = Path(__file__).parents[2] / "docs" / "methods"
    parser.add_argument("--out", type=Path, default=docs, help="a folder, made where it is missing (docs/methods)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(out / name)
        print(out / name)


if __name__ == "__main__":
    main()
