"""One of two processes that replace groups without a spread; run by test_trl_refill.py.

torchrun ... refill_ranks.py FOLDER     leaves in FOLDER what this process has then, and its weights after training
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tiny_trl import GROUP, generated, none_for_even_prompts, trainer

PROMPTS = ((3, 4), (6, 8))  # of each process; all rewards of the even ones are equal


def main(folder: str) -> None:
    torch.set_num_threads(1)
    made = trainer(
        refill=2, rollouts=GROUP, tokens=1.0, reward_funcs=none_for_even_prompts, ddp_backend="gloo",
        per_device_train_batch_size=2 * GROUP, gradient_accumulation_steps=1, output_dir=folder,
    )  # fmt: skip
    here = made.accelerator.process_index
    batch = generated(made, PROMPTS[here])
    found = {"batch": batch, "logged": {name: list(value) for name, value in made._metrics["train"].items()}}
    found["prompts"] = list(made._logs["prompt"])
    made.train()
    found["weights"] = torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])
    torch.save(found, Path(folder) / f"{here}.pt")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the interpreter's shutdown, in which gloo's threads may abort


if __name__ == "__main__":
    main(*sys.argv[1:])
