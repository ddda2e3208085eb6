"""A model and a trainer that take only a moment to make, and a generation batch as TRL leaves it."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import tempfile
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
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.integrations.trl.head import d3s_head
from d3s_kernels.integrations.trl.sets import SETS

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


def arguments(kind: type[GRPOConfig] = D3SConfig, **changed: Any) -> GRPOConfig:
    common: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/d3s-trl",
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP,
        "max_completion_length": 12,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    ours: dict[str, Any] = {}
    if kind is D3SConfig:
        ours = {"rollouts_start": 4, "rollouts_end": 4, "token_ratio_start": 0.25, "token_ratio_end": 0.25}
    return kind(**{**common, **ours, **changed})


def trainer(kind: type[GRPOTrainer] = D3STrainer, policy: Any = None, **changed: Any) -> GRPOTrainer:
    """A trainer that is ready to compute the loss of a batch."""
    options = {name: changed.pop(name) for name in ("peft_config", "eval_dataset") if name in changed}
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


def generation_batch(seed: int, rows: int = 2 * GROUP, prompt: int = 4, completion: int = 10) -> dict[str, Tensor]:
    """Ragged prompts and completions, and advantages of groups, which are all 0 in the second group."""
    random = torch.Generator().manual_seed(seed)
    begins = torch.randint(0, prompt, (rows, 1), generator=random)
    ends = torch.randint(1, completion + 1, (rows, 1), generator=random)
    advantages = torch.randn(rows, generator=random)
    advantages[GROUP : 2 * GROUP] = 0
    mask = (torch.arange(completion) < ends).long()
    return {
        "prompt_ids": torch.randint(2, VOCABULARY, (rows, prompt), generator=random),
        "prompt_mask": (torch.arange(prompt) >= begins).long(),
        "completion_ids": torch.randint(2, VOCABULARY, (rows, completion), generator=random) * mask,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }


def with_sets(batch: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The batch with a random set for each token, of 1 to 7 tokens, the token itself among them."""
    random = torch.Generator().manual_seed(seed)
    tokens = batch["completion_ids"].unsqueeze(2)
    others = torch.rand(*tokens.shape[:2], VOCABULARY, generator=random).argsort(dim=2)[..., :6]
    sizes = torch.randint(6, tokens.shape, generator=random)
    others = others.masked_fill((torch.arange(6) >= sizes) | (others == tokens), -1)
    sets = torch.cat([tokens, others], dim=2).int().masked_fill(batch["completion_mask"].unsqueeze(2) == 0, -1)
    return batch | {SETS: sets}


class Seen:
    """What a trainer's updates saw: their batches, with TRL's scores of them."""

    def __init__(self, made: D3STrainer) -> None:
        self.batches: list[dict[str, Any]] = []
        score, add = made._score_for_loss, made._add_sets

        def scoring(update: Any, call: Any, inputs: dict[str, Any]) -> Any:
            with torch.no_grad():
                over_all = call.scores()[0]  # log-probabilities over the whole vocabulary
            found = score(update, call, inputs)
            own = dict(zip(("logprob", "entropy"), (part.detach().clone() for part in found[:2]), strict=True))
            self.batches.append({**inputs, **own, "over_all": over_all})
            return found

        def adding(batch: dict[str, Any]) -> None:
            # The mass that the sampler measured goes where its rows go, as one more field of the batch.
            batch["log_mass"] = made._recorded.in_columns(batch["completion_ids"].shape[1]).log_mass
            add(batch)

        made._score_for_loss, made._add_sets = scoring, adding

    def tokens(self, name: str) -> Tensor:
        """A field's values at all tokens."""
        fields = [(batch[name], batch["completion_mask"].bool()) for batch in self.batches]
        return torch.cat([field[:, : mask.shape[1]][mask] for field, mask in fields])


def micro_batch(seed: int, rows: int = GROUP, completion: int = 10) -> dict[str, Tensor]:
    """A micro-batch of one group with different advantages."""
    return generation_batch(seed, rows, completion=completion)


def gradients(made: GRPOTrainer) -> Tensor:
    """The gradients of all parameters as one vector. They are cleared afterwards."""
    found = [parameter.grad for parameter in made.model.parameters() if parameter.requires_grad]
    vector = torch.cat([torch.zeros(0) if grad is None else grad.flatten() for grad in found])
    made.model.zero_grad(set_to_none=True)
    return vector


def loss_and_gradients(made: GRPOTrainer, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    loss = made.compute_loss(made.model, batch)
    loss.backward()
    return loss.item(), gradients(made)
