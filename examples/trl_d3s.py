"""D3S in TRL: `D3STrainer` replaces `GRPOTrainer`, `D3SConfig` replaces `GRPOConfig`.

    pip install --no-build-isolation '.[trl]'
    python examples/trl_d3s.py                                       # a tiny model, made on the spot, on a CPU
    python examples/trl_d3s.py --model Qwen/Qwen2.5-0.5B-Instruct    # on a GPU

The policy learns to add two numbers. docs/trl.md explains what happens in a step and lists all options.
"""

from __future__ import annotations

import argparse
import re
from itertools import product
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer  # were GRPOConfig, GRPOTrainer from trl

GROUP = 16  # generations for each prompt


def sums() -> Dataset:
    rows = [{"prompt": f"{a} + {b} =", "answer": a + b} for a, b in product(range(10), repeat=2)]
    return Dataset.from_list(rows)


def nearness(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 if the first number of the completion is the right sum; less, the further it is from the sum."""
    numbers = [re.search(r"\d+", text) for text in completions]
    return [
        0.0 if number is None else max(0.0, 1 - abs(int(number[0]) - right) / 20)
        for number, right in zip(numbers, answer, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="trl-d3s")
    given = parser.parse_args()
    tiny = given.model is None
    trainer = D3STrainer(
        model=tiny_model() if tiny else given.model,
        reward_funcs=nearness,
        train_dataset=sums(),
        processing_class=tiny_tokenizer() if tiny else None,
        args=D3SConfig(
            given.out,
            # D3S: keeps 4 of each prompt's 16 rollouts at first and 12 at the end; 25 % of their tokens, then 50 %.
            rollouts_start=4,
            rollouts_end=12,
            token_ratio_start=0.25,
            token_ratio_end=0.5,
            # All other options are TRL's.
            num_generations=GROUP,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=4,
            max_completion_length=4 if tiny else 64,
            learning_rate=3e-3 if tiny else 1e-6,
            max_steps=given.steps,
            logging_steps=max(1, given.steps // 5),
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
    )
    trainer.train()
    print(f"{'step':>5} {'reward':>7} {'rollouts kept':>14} {'share of tokens':>16}")
    for row in trainer.state.log_history:
        if "reward" in row:
            kept, share = row["d3s/rollouts_kept"], row["d3s/token_share"]
            print(f"{row['step']:5} {row['reward']:7.3f} {kept:14.0f} {share:16.2f}")


# ---- a tiny language model, to run this without a download -----------------------------------------------------------


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "+", "=", *map(str, range(20))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 24, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=1))


if __name__ == "__main__":
    main()
