"""A model and a trainer that take only a moment to make."""

from __future__ import annotations

import atexit
import doctest
import functools
import gc
import os
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from accelerate.utils import imports
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.integrations.trl.head import d3s_head

atexit.register(gc.unfreeze)
# Accelerate looks for the same packages on the disk in every step.
imports._is_package_available = functools.cache(imports._is_package_available)

VOCABULARY, PAD, EOS = 61, 0, 1
GROUP = 8


class PlainTrainer(GRPOTrainer):
    """TRL's trainer. Before 1.16 its LM head needs a GPU, so ours replaces it."""

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        with nullcontext() if hasattr(trl_utils, "_use_triton") else d3s_head():
            return super()._get_per_token_logps_and_entropies(*arguments, **options)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model(seed: int = 0, **config: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": EOS}
    made = Qwen2ForCausalLM(Qwen2Config(**{**shape, **heads, **special, **config}))
    with torch.no_grad():  # spreads the logits so that entropies differ
        made.get_output_embeddings().weight.mul_(20)
    return made


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def none_for_even_prompts(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same reward for all rollouts of a prompt whose first word is even, another for each rollout of the others."""
    even = [int(prompt.split()[0][1:]) % 2 == 0 for prompt in prompts]
    seen = [float(sum(tokens) % 97 + place) for place, tokens in enumerate(completion_ids)]
    return [1.0 if is_even else reward for is_even, reward in zip(even, seen, strict=True)]


def arguments(
    kind: type[GRPOConfig] = D3SConfig, rollouts: float = 4, tokens: float = 0.25, **changed: Any
) -> GRPOConfig:
    """Options. Ours keep half of the rollouts and a quarter of the tokens from start to end, if not told otherwise."""
    common: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/d3s-trl", "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": 2, "num_generations": GROUP, "max_completion_length": 12, "max_steps": 2,
        "logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    if kind is D3SConfig:
        common |= {f"rollouts_{end}": rollouts for end in ("start", "end")}
        common |= {f"token_ratio_{end}": tokens for end in ("start", "end")}
    return kind(**{**common, **changed})


def trainer(kind: type[GRPOTrainer] = D3STrainer, policy: Any = None, **changed: Any) -> GRPOTrainer:
    """A trainer that is ready to compute the loss of a batch."""
    options = {name: changed.pop(name) for name in ("peft_config", "eval_dataset", "rollout_func") if name in changed}
    made = kind(
        model() if policy is None else policy,
        changed.pop("reward_funcs", share_of_even),
        arguments(D3SConfig if issubclass(kind, D3STrainer) else GRPOConfig, **changed),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(2, 34)]}),
        processing_class=tokenizer(),
        **options,
    )
    # A training run collects garbage: a third of a second if that goes through all that was made before.
    gc.freeze()
    made.model.train()
    made.state.max_steps = made.args.max_steps
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    return made


def run_example(documented: Any, **given: Any) -> None:
    """Runs the example of a docstring, in which these names are known."""
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, documented.__name__, globs=given)
    report: list[str] = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append).attempted > 0
    assert not report, "".join(report)


def generated(made: GRPOTrainer, prompts: Iterable[int] = (3, 5)) -> dict[str, Any]:
    """A generation batch of the trainer's own, with a group for each prompt."""
    return made._generate_and_score_completions([{"prompt": f"w{i} w7"} for i in prompts for _ in range(GROUP)])
