"""A model, data and a run of `swift rlhf` in this process, which take only a moment."""

from __future__ import annotations

import json
import os
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import torch
from swift.arguments import RLHFArguments
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.template import TemplateMeta, register_template
from swift.trainers import TrainerFactory
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from d3s_kernels.integrations.swift import PLUGIN

GROUP, STEPS = 8, 2
CHARACTERS = (string.ascii_letters + string.digits)[:59]
VOCABULARY, PAD, EOS = 61, 0, 1


class Vowels(ORM):
    """The share of a completion's characters that are vowels or even digits."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [sum(one in "aeiouAEIOU02468" for one in text) / max(len(text), 1) for text in completions]


orms["vowels"] = Vowels
register_template(
    TemplateMeta("plain", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[["eos_token_id"]]), exist_ok=True
)


def make_model(folder: Path) -> None:
    """Writes a model with one layer, its tokenizer, and prompts."""
    words = {"<pad>": PAD, "<eos>": EOS} | {one: place + 2 for place, one in enumerate(CHARACTERS)}
    special = {"unk_token": "<eos>", "pad_token": "<pad>", "eos_token": "<eos>"}
    Qwen2Tokenizer(vocab=words, merges=[], padding_side="left", **special).save_pretrained(folder)
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=EOS,
        )
    )  # fmt: skip
    with torch.no_grad():  # spreads the logits so that entropies differ
        made.get_output_embeddings().weight.mul_(20)
    made.save_pretrained(folder)
    rows = [{"messages": [{"role": "user", "content": CHARACTERS[i : i + 2]}]} for i in range(32)]
    Path(folder, "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Run:
    """What a run left: its trainer, with the model after the last step."""

    def __init__(self, pipeline: SwiftRLHF, trainer: GRPOTrainer) -> None:
        self.pipeline, self.trainer = pipeline, trainer

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.trainer.model.named_parameters()}

    def logged(self, name: str) -> list[float]:
        return [row[name] for row in self.trainer.state.log_history if name in row]


def command(folder: Path, **changed: Any) -> list[str]:
    """The command line of `swift rlhf`."""
    options: dict[str, Any] = {
        "rlhf_type": "grpo", "model": folder, "model_type": "qwen2", "template": "plain", "tuner_type": "full",
        "dataset": folder / "prompts.jsonl", "reward_funcs": "vowels", "torch_dtype": "float32", "use_hf": True,
        "num_generations": GROUP, "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": STEPS,
        "max_completion_length": 12, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "beta": 0.0,
        "save_strategy": "no", "report_to": "none", "output_dir": folder / "out", "use_cpu": True,
        "dataloader_num_workers": 0, "dataset_num_proc": 1, "attn_impl": "sdpa", "gradient_checkpointing": False,
        "split_dataset_ratio": 0, "check_model": False,
    }  # fmt: skip
    return [part for name, value in (options | changed).items() for part in (f"--{name}", str(value))]


def train(
    folder: Path, d3s: dict[str, Any] | None = None, *, before: Callable[[GRPOTrainer], None] | None = None,
    **changed: Any,
) -> Run:  # fmt: skip
    """A run of `swift rlhf`: with the plug-in and these options of D3S, or with None ms-swift's own.

    Args:
        before: called with the trainer before it trains.
    """
    if d3s is not None:
        values = json.dumps({f"d3s_{name}": value for name, value in d3s.items()})
        changed = {"external_plugins": PLUGIN, "model_kwargs": values} | changed
    made: list[GRPOTrainer] = []

    def trained(pipeline: SwiftRLHF, trainer: GRPOTrainer) -> None:
        made.append(trainer)
        if before is not None:
            before(trainer)
        trainer.train()

    for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
        del sys.modules[name]  # ms-swift imports a plug-in once in a process
    with (
        patch.dict(TrainerFactory.TRAINER_MAPPING),
        patch.dict(TrainerFactory.TRAINING_ARGS_MAPPING),
        patch.dict(os.environ),  # ms-swift puts model_kwargs there
        patch.object(SwiftRLHF, "train", trained),
        patch.object(RLHFArguments, "_check_padding_free", lambda self: None),  # asks for flash attention
    ):
        pipeline = SwiftRLHF(command(folder, **changed))
        pipeline.main()
    return Run(pipeline, made[0])


def after(trainer: GRPOTrainer, name: str, then: Callable[..., None]) -> None:
    """After each call of this method, ``then`` gets its result and its arguments."""
    method = getattr(trainer, name)

    def called(*arguments: Any) -> Any:
        result = method(*arguments)
        then(result, *arguments)
        return result

    setattr(trainer, name, called)
