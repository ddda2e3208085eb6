"""An update of TRL's trainer on a generation batch, from the advantages to the gradients, without the optimiser step.

`GRPOTrainer` trains on all rollouts; `D3STrainer` trains on half of them and a tenth of their tokens. Model, batch and
everything else are the same. The model has random weights, which no update changes, so all trainers share it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.integrations.trl.head import d3s_head

from . import inputs
from .sizes import Sizes

GRPO, GRPO_OUR_HEAD = "GRPOTrainer", "GRPOTrainer with our LM head"  # the second shows the head's effect alone
OURS, OURS_PASS = "d3s_kernels", "d3s_kernels, entropy from a pass before"
PAD, EOS = 0, 1
HALF_AND_TENTH = {"token_ratio_start": 0.1, "token_ratio_end": 0.1}
# Qwen2.5's shapes: the number of layers and their sizes. The 7B model has two of its layers, but its complete head.
SHAPES = {
    "small": {"num_hidden_layers": 2, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.5B": {"num_hidden_layers": 24, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "7B, 2 of its layers": {
        "num_hidden_layers": 2, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    },
}  # fmt: skip
WIDTHS = {"small": 256, "0.5B": 896, "7B, 2 of its layers": 3584}


def update(name: str, sizes: Sizes, shape: str = "small") -> Callable[[], float]:
    """The update, as a function that returns the loss; it also computes the gradients, and drops them."""
    trainer = trainer_of(name, sizes, shape)
    batch = generation_batch(sizes)

    def run() -> float:
        kept = trainer._keep_rollouts(dict(batch)) if name in (OURS, OURS_PASS) else batch
        if name == OURS_PASS:
            trainer._choose_tokens_of_batch(kept)
        with trainer.compute_loss_context_manager(), d3s_head() if name == GRPO_OUR_HEAD else nullcontext():
            loss = trainer.compute_loss(trainer.model, kept)
        return backward(trainer, loss)

    return run


def known_update(sizes: Sizes, shape: str, cut: bool) -> Callable[[], float]:
    """The update alone, with tokens chosen before it. It forwards what these tokens need (`cut`), or all tokens."""
    trainer = trainer_of(OURS_PASS, sizes, shape)
    if not cut:
        trainer._tokens_are_independent = lambda batch: False
    batch = trainer._keep_rollouts(generation_batch(sizes))
    trainer._choose_tokens_of_batch(batch)

    return lambda: backward(trainer, trainer.compute_loss(trainer.model, batch))


def backward(trainer: GRPOTrainer, loss: torch.Tensor) -> float:
    loss.backward()
    trainer.model.zero_grad(set_to_none=True)  # so that the measured memory includes the gradients
    return loss.item()


def entropy_pass(sizes: Sizes, shape: str, useful: float) -> Callable[[], torch.Tensor]:
    """The entropy pass that precedes the choice of tokens; a share `useful` of the rollouts has an advantage."""
    trainer = trainer_of(OURS_PASS, sizes, shape)
    batch = generation_batch(sizes)
    batch["advantages"][round(useful * sizes.rollouts) :] = 0
    return lambda: trainer._entropy(batch)


@lru_cache(maxsize=1)
def model_of(vocabulary: int, shape: str) -> Qwen2ForCausalLM:
    """The model, created on its device and in its precision: drawing its weights on a CPU would take a minute."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=WIDTHS[shape],
        tie_word_embeddings=shape != "7B, 2 of its layers",
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=EOS,
        **SHAPES[shape],
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if inputs.device.type == "cuda" else torch.float32)
    try:
        with inputs.device:
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def trainer_of(name: str, sizes: Sizes, shape: str, **changed: Any) -> GRPOTrainer:
    on_gpu = inputs.device.type == "cuda"
    model = model_of(sizes.vocabulary, shape)
    common: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/d3s-trl",
        "per_device_train_batch_size": sizes.rollouts,
        "num_generations": sizes.rollouts,
        "max_completion_length": sizes.completion,
        "max_steps": 1,
        "report_to": [],
        "use_cpu": not on_gpu,
        "bf16": False,
        "gradient_checkpointing": on_gpu,
    }
    ours = HALF_AND_TENTH | {"rollouts_start": sizes.rollouts // 2, "rollouts_end": sizes.rollouts // 2} | changed
    if name in (GRPO, GRPO_OUR_HEAD):
        kind, arguments = GRPOTrainer, GRPOConfig(**common)
    else:
        kind, arguments = (
            D3STrainer,
            D3SConfig(entropy_from="rollout" if name == OURS_PASS else "update", **common, **ours),
        )
    words = Tokenizer(WordLevel({"<pad>": PAD, "<eos>": EOS}, unk_token="<eos>"))
    trainer = kind(
        model,
        lambda completion_ids, **_: [0.0] * len(completion_ids),
        arguments,
        train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * sizes.rollouts}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )
    if on_gpu:  # TRL's default; `train` would enable it, but does not run here
        model = trainer.model
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    trainer.model.train()
    trainer.state.max_steps = 1
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def generation_batch(sizes: Sizes) -> dict[str, torch.Tensor]:
    """A batch as TRL's generation makes it: prompts of up to 16 tokens, full-length completions, normal advantages."""
    random = torch.Generator().manual_seed(1)
    rows = sizes.rollouts
    lengths = torch.randint(8, 17, (rows, 1), generator=random)
    batch = {
        "prompt_ids": torch.randint(2, sizes.vocabulary, (rows, 16), generator=random),
        "prompt_mask": (torch.arange(16) >= 16 - lengths).long(),
        "completion_ids": torch.randint(2, sizes.vocabulary, (rows, sizes.completion), generator=random),
        "completion_mask": torch.ones(rows, sizes.completion, dtype=torch.long),
        "advantages": torch.randn(rows, generator=random),
        "num_items_in_batch": torch.tensor(rows * sizes.completion),
    }
    return {name: value.to(inputs.device) for name, value in batch.items()}
