"""Whole training runs with TRL: `train()` with transformers' own generation, bfloat16, activation checkpointing, and a
Qwen2 model with some 20 million parameters and Qwen2.5's vocabulary, which is made here.

    python -m benchmarks.training_run                the GPU, or a CPU where there is none
    python -m benchmarks.training_run --rehearse     a smaller model and fewer steps, on the CPU

Four runs:

1. `GRPOTrainer`. What it generates is recorded.
2. `D3STrainer` with nothing dropped, on the recorded completions. Its losses and gradient norms must be those of the
   first run, as far as bfloat16 allows. Each generation batch is trained on twice, so that the losses of every second
   step depend on the model's log-probabilities; otherwise they would depend on advantages alone.
3. `D3STrainer` with half of the rollouts and a tenth of their tokens. It generates for itself, and writes a checkpoint
   in the middle.
4. The third run again from this checkpoint. It must go on where the third run was.

The last table has the measured time of a step without generation, beside what `d3s savings` counts. The program ends
with 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import operator
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.savings.__main__ import counted, options_of

from .targets import ALL_TOKENS, GRPO
from .trl_step import EOS, GROUP, PAD, Shape

PROMPTS, MICRO_BATCH = 4, 8
DROPPED = "d3s_kernels, half of the rollouts and 10% of their tokens"
RESUMED = f"{DROPPED}, resumed"
KEPT = {"rollouts_start": 0.5, "rollouts_end": 0.5, "token_ratio_start": 0.1, "token_ratio_end": 0.1}
# With random weights, one token in 151,936 would end an answer. This is added to the logit of the end, so that answers
# have some 20 tokens.
END_BIAS = 9.0
# The allowed differences: of a loss, as a share of the largest one; and of a gradient's norm, as a share of this norm.
# In 30 steps on a CPU they were 0.0002 and 0.001.
LOSS, NORM = 0.01, 0.02


class Setting:
    def __init__(self, rehearse: bool) -> None:
        self.on_gpu = torch.cuda.is_available() and not rehearse
        self.steps, self.answer = (6, 16) if rehearse else (30, 64)
        vocabulary, width = (2_000, 32) if rehearse else (151_936, 128)
        self.shape = Shape(2 if rehearse else 4, width, 4 * width, 2, 1, True, vocabulary)
        self.end_bias = END_BIAS - 4 * rehearse

    def model(self) -> Qwen2ForCausalLM:
        torch.manual_seed(0)
        return Qwen2ForCausalLM(self.shape.config(0))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, self.shape.vocabulary or 0)}
        made = Tokenizer(WordLevel(words, unk_token="<eos>"))
        made.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


class Clocked(GRPOTrainer):
    """TRL's trainer. It measures the time of generation, and records what it generates or takes what was recorded."""

    record: list[Any] | None = None  # generation goes here
    replay: Iterator[Any] | None = None  # generation comes from here
    generating = 0.0  # seconds, in the current step

    def _generate(self, prompts: list[Any]) -> Any:
        start = now()
        found = super()._generate(prompts) if self.replay is None else next(self.replay)
        if self.record is not None:
            self.record.append(found)
        if self.record is not None or self.replay is not None:  # what TRL draws next is the same for both
            torch.manual_seed(self.state.global_step)
        self.generating += now() - start
        return found


class ClockedD3S(D3STrainer, Clocked):
    """Our trainer."""


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Times(TrainerCallback):
    """The seconds of each step: all of it, and its generation."""

    def __init__(self, trainer: Clocked) -> None:
        self.trainer, self.steps, self.start = trainer, list[tuple[float, float]](), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start, self.trainer.generating = now(), 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append((now() - self.start, self.trainer.generating))


class Run:
    """A training run: what was logged of each step, and the times."""

    def __init__(
        self, kind: type[Clocked], setting: Setting, folder: Path, *, record: list[Any] | None = None,
        replay: list[Any] | None = None, resume: Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        arguments = (D3SConfig if issubclass(kind, D3STrainer) else GRPOConfig)(
            output_dir=str(folder), max_steps=setting.steps, num_generations=GROUP,
            max_completion_length=setting.answer, per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=PROMPTS * GROUP // MICRO_BATCH, learning_rate=1e-4, bf16=True,
            gradient_checkpointing=True, use_cpu=not setting.on_gpu, logging_steps=1, report_to=[], disable_tqdm=True,
            generation_kwargs={"sequence_bias": [[[EOS], setting.end_bias]]},
            **{"save_strategy": "no"} | options,
        )  # fmt: skip
        prompts = [f"w{i} w{i + 1} w{i + 2}" for i in range(2, 200)]
        trainer = kind(
            setting.model(), share_of_even, arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=setting.tokenizer(),
        )  # fmt: skip
        trainer.record, trainer.replay = record, None if replay is None else iter(replay)
        trainer.add_callback(times := Times(trainer))
        with contextlib.redirect_stdout(io.StringIO()):  # TRL prints what it logs
            trainer.train(resume_from_checkpoint=resume and str(resume))
        done = trainer.state.max_steps - len(times.steps)  # before the checkpoint
        self.rows = [row for row in trainer.state.log_history if "loss" in row and row["step"] > done]
        self.times = times.steps

    def of(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    @property
    def update(self) -> float:
        """The median seconds of a step without generation, over the second half of the run. If some steps do not
        generate, only these count.
        """
        steps = self.times[len(self.times) // 2 :]
        return statistics.median([step for step, making in steps if not making] or [a - b for a, b in steps])

    @property
    def generation(self) -> float:
        """The median seconds of a generation."""
        return statistics.median([making for _, making in self.times if making])


def differences(first: Run, second: Run) -> Iterator[str]:
    """Compares the losses and norms of two runs over the same steps."""
    for name, allowed in (("loss", LOSS), ("grad_norm", NORM)):
        one, other = torch.tensor([first.of(name), second.of(name)], dtype=torch.float64)
        of = one.abs().amax() if name == "loss" else one.abs()
        worst = float(((one - other).abs() / of).nan_to_num(math.inf).amax())
        verdict = "same" if worst <= allowed else "WRONG"
        yield f"{verdict}: {name} differs by {worst:.1e} at most; {allowed} is allowed"


def what_was_kept(run: Run) -> Iterator[str]:
    """Checks what each step of the third run kept, and that everything is finite. Tokens are chosen in each
    micro-batch, and their number is rounded up.
    """
    for number, row in enumerate(run.rows, 1):
        kept = row["d3s/tokens_kept"]
        right = row["d3s/rollout_share"] == 0.5 and -1e-6 < kept - 0.1 * kept / row["d3s/token_share"] < 1
        if not (right and math.isfinite(row["loss"]) and 0 < row["grad_norm"] < math.inf):
            yield f"WRONG: step {number}: {row}"


def resumed_where_it_was(whole: Run, resumed: Run) -> Iterator[str]:
    """The first step after the checkpoint must generate the same answers, and have the same loss and gradient. Later
    steps may draw other answers, since a GPU adds gradients in any order; but counters and budgets go on.
    """
    rows = whole.rows[-len(resumed.rows) :]
    for name in ("reward", "completions/mean_length", "d3s/num_tokens_kept", "loss", "grad_norm"):
        one, other = rows[0][name], resumed.rows[0][name]
        allowed = {"loss": LOSS, "grad_norm": NORM}.get(name, 0.0)
        verdict = "same" if abs(one - other) <= allowed * abs(one) else "WRONG"
        yield f"{verdict}: first step after the checkpoint, {name}: {other} where the whole run has {one}"
    lengths = [row["completions/mean_length"] for row in rows]
    same = sum(map(operator.eq, lengths, resumed.of("completions/mean_length")))
    yield f"same: lengths of the answers in {same} of {len(rows)} resumed steps"
    for name in ("epoch", "learning_rate", "d3s/rollout_share_asked", "d3s/token_share_asked"):
        if (one := [row[name] for row in rows]) != (other := resumed.of(name)):
            yield f"WRONG: {name} after the checkpoint: {other} where the whole run has {one}"


def counted_shares(setting: Setting, record: list[Any], folder: Path) -> dict[str, float]:
    """What `d3s savings` counts for these answers: the operations of an update, as a share of those of TRL's."""
    lengths = folder / "lengths.txt"
    lengths.write_text("\n".join(str(len(ids)) for _, answers, *_ in record for ids in answers))
    config = folder / "config.json"
    config.write_text(json.dumps(setting.shape.config(0).to_dict()))
    words = f"{config} --prompts {PROMPTS} --group-size {GROUP} --micro-batch {MICRO_BATCH} --prompt-length 3"
    words += f" --lengths {lengths} --rollouts-kept 0.5 --token-share 0.1"
    choices = counted(options_of(words.split()))["choices"]
    names = {ALL_TOKENS: "nothing dropped", DROPPED: "rollouts + tokens in the update"}
    return {run: choices[name]["update"] for run, name in names.items()}


def times_and_rewards(runs: dict[str, Run], counts: dict[str, float], few: int) -> Iterator[str]:
    """Says for each run how long a step took, and the mean reward of the first and the last few steps."""
    for name, run in runs.items():
        said = [f"run: {name}: {len(run.rows)} steps, {run.update:.3f} s each without generation"]
        if name in counts:
            said.append(f"{run.update / runs[GRPO].update:.2f}x of {GRPO}'s, counted {counts[name]:.2f}x")
        if name != ALL_TOKENS:
            said.append(f"{run.generation:.3f} s to generate")
        first, last = (statistics.mean(part) for part in (run.of("reward")[:few], run.of("reward")[-few:]))
        yield "; ".join([*said, f"reward {first:.3f}, at the end {last:.3f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    setting = Setting(parser.parse_args().rehearse)
    record: list[Any] = []
    wrong = 0

    def say(lines: Iterable[str]) -> None:
        nonlocal wrong
        for line in lines:
            wrong += line.startswith("WRONG")
            print(line, flush=True)

    with tempfile.TemporaryDirectory() as place:
        folder, half = Path(place), setting.steps // 2
        runs = {GRPO: Run(Clocked, setting, folder / "1", record=record, num_iterations=2)}
        runs[ALL_TOKENS] = Run(ClockedD3S, setting, folder / "2", replay=record, num_iterations=2, keep_all=True)
        say(differences(runs[GRPO], runs[ALL_TOKENS]))
        runs[DROPPED] = Run(ClockedD3S, setting, folder / "3", save_strategy="steps", save_steps=half, **KEPT)
        say(what_was_kept(runs[DROPPED]))
        runs[RESUMED] = Run(ClockedD3S, setting, folder / "4", resume=folder / "3" / f"checkpoint-{half}", **KEPT)
        say(resumed_where_it_was(runs[DROPPED], runs[RESUMED]))
        say(times_and_rewards(runs, counted_shares(setting, record, folder), setting.steps // 6))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
