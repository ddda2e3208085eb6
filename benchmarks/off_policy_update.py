"""Times our update and TRL's update, in turns. In the batch, TRL corrects vLLM's probabilities, which multiplies the
loss of some tokens by 0.

    python -m benchmarks.off_policy_update
    python -m benchmarks.off_policy_update --device cuda --shape 0.5B --rollouts 32 --completion 1024

Both trainers keep all rollouts and tokens, and share one model and one batch with recorded lengths. In this batch,
vLLM's ratio is 0 for a share of the tokens, or of the sequences. TRL's trainer computes these tokens and multiplies
their loss by 0. Our trainer does not compute these tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import trl
from torch import Tensor

from . import inputs, machine
from .recorded import entropy_of
from .sizes import Sizes
from .targets import SMALL_MODEL
from .trl_step import GRPO, OURS_PASS, SHAPES, generation_batch, trainer_of


def updates(sizes: Sizes, model: str, dropped: float, of_sequences: bool) -> dict[str, Callable[[], Tensor]]:
    """TRL's update and ours; ours begins with the choice of tokens. Each update returns the gradient of the LM head."""
    batch: dict[str, Any] = generation_batch(sizes, model)
    generator = torch.Generator().manual_seed(2)
    shape_of_tokens = batch["completion_ids"].shape
    shape = (sizes.rollouts, 1) if of_sequences else shape_of_tokens
    order = torch.rand(shape, generator=generator).flatten().argsort()
    batch["importance_sampling_ratio"] = (order >= round(dropped * len(order))).float().view(shape).to(inputs.device)
    batch["advantages"] = inputs.advantages(sizes.rollouts)  # no advantage is 0: only off-policy tokens are left out
    vocabulary = SHAPES[model].vocabulary or sizes.vocabulary
    # close to the log-probabilities of a model with random weights
    batch["old_per_token_logps"] = torch.full(shape_of_tokens, -math.log(vocabulary), device=inputs.device)
    batch["d3s_entropy"] = entropy_of(batch["completion_ids"])  # as if from the pass for old log-probabilities
    found = {}
    for name in (GRPO, OURS_PASS):
        trainer = trainer_of(
            name, sizes, model, rollouts_start=1.0, rollouts_end=1.0, token_ratio_start=1.0, token_ratio_end=1.0
        )
        trainer.use_vllm = True  # makes TRL read the ratios

        def run(trainer: Any = trainer, ours: bool = name != GRPO) -> Tensor:
            own = dict(batch)
            if ours:
                trainer._choose_tokens_of_batch(own)
            loss = trainer.compute_loss(trainer.model, own)
            loss.backward()
            gradient = trainer.model.get_output_embeddings().weight.grad.clone()
            trainer.model.zero_grad(set_to_none=True)
            return gradient

        found[name] = run
    return found


def compared(made: dict[str, Callable[[], Tensor]], rounds: int) -> str:
    theirs, ours = (made[name]().float() for name in (GRPO, OURS_PASS))  # also warms up
    on_cpu = inputs.device.type == "cpu"
    finish = (lambda: None) if on_cpu else torch.cuda.synchronize
    apart = float((ours - theirs).norm() / theirs.norm())
    assert apart < (1e-4 if on_cpu else 0.1), apart  # a GPU's model is in bfloat16, and may clip other ratios
    del theirs, ours
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds):
        for name in sorted(made, reverse=bool(turn % 2)):
            finish()
            start = perf_counter()
            made[name]()
            finish()
            times[name].append(perf_counter() - start)
    pairs = [own / other for own, other in zip(times[OURS_PASS], times[GRPO], strict=True)]
    fastest = [f"{1000 * min(times[name]):7.0f} ms" for name in (GRPO, OURS_PASS)]
    low, middle, high = min(pairs), statistics.median(pairs), max(pairs)
    best = min(times[OURS_PASS]) / min(times[GRPO])
    return f"{fastest[0]} {fastest[1]}    {best:5.2f}x   {middle:5.2f}x ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option, default in {"rollouts": 8, "completion": 64, "vocabulary": 151_936, "rounds": 15}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default=SMALL_MODEL, choices=SHAPES)
    parser.add_argument("--dropped", type=float, nargs="+", default=[0.0, 0.2, 0.5])
    given = parser.parse_args()
    inputs.device = torch.device(given.device)
    sizes = Sizes(rollouts=given.rollouts, completion=given.completion, vocabulary=given.vocabulary)
    name = torch.cuda.get_device_name() if given.device == "cuda" else machine.cpu_model()
    print(name, "torch", torch.__version__, "TRL", trl.__version__, "commit", machine.commit())
    print(vars(given))
    print(f"{'dropped':24}{'TRL':>10} {'ours':>10} {'fastest':>10}   median of the pairs")
    for of_sequences in (False, True):
        for dropped in given.dropped:
            label = f"{dropped:.0%} of the {'sequences' if of_sequences else 'tokens'}"
            print(f"{label:24}{compared(updates(sizes, given.shape, dropped, of_sequences), given.rounds)}")


if __name__ == "__main__":
    main()
