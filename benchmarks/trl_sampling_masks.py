"""Compares TRL's update with sampling masks and without: its time, its memory, and how much the trainer's
log-probabilities differ from the sampler's.

    python -m benchmarks.trl_sampling_masks --model FOLDER    # a chat model, such as the one of make demo
    python -m benchmarks.trl_sampling_masks --tokenizer FOLDER --wide    # two layers of Qwen2.5-0.5B and its vocabulary

Both sides sample with top-p 0.9, top-k 50 and temperature 0.8, and train in float32 on 8 rollouts of one prompt, on all
of their tokens. Each side runs in a process of its own, because a process's peak of memory can only rise. The two sides
take turns. The table has the medians of the rounds, and the smallest and largest values.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2ForCausalLM

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.integrations.trl.batch import SETS

from .memory import growth
from .sizes import FULL
from .trl_step import SHAPES

PROMPTS = ["Write a sentence about the sea.", "Name three colours.", "What is 17 + 25?", "Tell me a short story."]
WARM_UP = 2  # steps; the first steps create the optimiser's state
UPDATE, GENERATION = "one update, s", "generation of its rollouts, s"
MEMORY = "peak of the whole training beyond the model, MiB"
APART = "largest |sampling - training log-probability| of a first update"


class Watched(D3STrainer):
    """A trainer that records what the comparison needs. The time of an update is the time of a step, minus the time in
    which the step's batch is made.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.generations, self.preparations, self.steps = [], [], []
        self.apart: list[float] = []
        self.inputs: dict[str, Tensor] = {}

    def training_step(self, *arguments: Any) -> Tensor:
        return timed(self.steps, super().training_step, *arguments)

    def _prepare_inputs(self, *arguments: Any) -> Any:
        return timed(self.preparations, super()._prepare_inputs, *arguments)

    def _generate_single_turn(self, *arguments: Any) -> Any:
        return timed(self.generations, super()._generate_single_turn, *arguments)

    def _compute_loss(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        self.inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        scored = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if torch.is_grad_enabled() and SETS in self.inputs and not self.apart:
            # The first update: sampler and trainer are the same policy.
            away = (self.inputs["sampling_per_token_logps"] - scored[0].detach()).abs()
            self.apart.append(float(away[self.inputs["completion_mask"].bool()].max()))
        return scored


def timed(seconds: list[float], work: Callable[..., Any], *arguments: Any) -> Any:
    begin = time.perf_counter()
    try:
        return work(*arguments)
    finally:
        seconds.append(time.perf_counter() - begin)


def side(given: argparse.Namespace) -> dict[str, float]:
    """The measurements of one side: medians over the steps, and the means of TRL's log over all steps."""
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer or given.model)
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    trainer = Watched(
        wide_model() if given.wide else AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        lambda completion_ids, **_: [float(len(set(tokens))) for tokens in completion_ids],
        D3SConfig(
            f"{tempfile.gettempdir()}/d3s-trl",
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            max_completion_length=given.tokens,
            rollouts_start=1.0,
            rollouts_end=1.0,
            token_ratio_start=1.0,
            token_ratio_end=1.0,
            top_p=0.9,
            top_k=50,
            temperature=0.8,
            sampling_mask=given.side == "with",
            max_steps=given.steps,
            logging_steps=1,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts * given.steps}),
        processing_class=tokenizer,
    )
    memory = growth(trainer.train)
    updates = [step - preparation for step, preparation in zip(trainer.steps, trainer.preparations, strict=True)]
    logged = [row for row in trainer.state.log_history if "d3s/token_share" in row]
    means = {name: statistics.mean(row[name] for row in logged) for name in logged[0] if "d3s/set_" in name}
    return {
        UPDATE: statistics.median(updates[WARM_UP:]),
        MEMORY: memory / 2**20,
        GENERATION: statistics.median(trainer.generations[WARM_UP:]),
        **({APART: trainer.apart[0]} if trainer.apart else {}),
        **means,
    }


def wide_model() -> Qwen2ForCausalLM:
    """A model with random weights, and with the head, the vocabulary, and two of the 24 layers of Qwen2.5-0.5B."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(SHAPES["0.5B"]._replace(layers=2).config(FULL.vocabulary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a chat model")
    parser.add_argument("--wide", action="store_true", help="a model made on the spot, instead of --model")
    parser.add_argument("--tokenizer", help="a folder with a tokenizer, for --wide")
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens of a completion")
    parser.add_argument("--steps", type=int, default=8, help=f"the first {WARM_UP} are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="of both sides")
    parser.add_argument("--side", choices=("with", "without"), help="one side in this process, as JSON")
    given = parser.parse_args()
    if bool(given.model) == given.wide or given.wide != bool(given.tokenizer):
        parser.error("give --model, or --wide and --tokenizer")
    if given.rounds < 1:
        parser.error(f"--rounds: got {given.rounds}; takes at least 1")
    if given.steps <= WARM_UP:
        parser.error(f"--steps: got {given.steps}; takes more than {WARM_UP}")
    if given.side:
        print(json.dumps(side(given)))
        return
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(given.rounds):
        for name, rounds in found.items():
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--side", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':64} {'without':>22} {'with':>22}")
    for name in found["with"][0]:
        cells = (spread([values[name] for values in rounds if name in values]) for rounds in found.values())
        print(f"{name:64}", *(f"{cell:>22}" for cell in cells))


def spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.4g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
