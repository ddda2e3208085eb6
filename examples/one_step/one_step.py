"""One step of D3S on rollouts of a small language model: run `make step`, or this file with --help."""

import argparse
import os
from pathlib import Path

from rich.console import Console

# Waiting threads sleep instead of spinning: on a shared machine, spinning makes all processes several times slower.
# OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

WIDTH = 100  # of the text, in characters

INTRODUCTION = """\
[bold]What this shows.[/] In reinforcement learning of a language model (GRPO) the model answers every prompt several
times ("rollouts"), the answers are checked, and the model is updated on them. Most rollouts and most tokens carry
almost no gradient. D3S keeps those that do: the rollouts whose advantages differ most, and in them the tokens with the
largest |advantage| x entropy. Here is such a step with [bold]d3s_kernels[/], next to the same step in plain PyTorch:
what is kept, that the result is the same, and what it costs in time and memory.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the model, the task and the sampling (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("step.png"), help="where the picture goes (default: step.png)")
    parser.add_argument("--short", action="store_true", help="a smaller batch and less warm-up: under 30 seconds")
    arguments = parser.parse_args()
    if not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out: {arguments.out.absolute().parent} is not a directory")

    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(" ".join(INTRODUCTION.split()))
    from _run import run  # after the first output, since torch and transformers take seconds to import

    run(arguments.seed, arguments.out, arguments.short, console)


if __name__ == "__main__":
    main()
