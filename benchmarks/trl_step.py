"""An update of TRL's trainer on a generation batch, from the advantages to the gradients, without the optimiser step.

`GRPOTrainer` trains on all rollouts; `D3STrainer` trains on half of the rollouts and a tenth of their tokens, on all
tokens of half of the rollouts, or on all tokens of all rollouts. Model, batch and everything else are the same. The
model has random weights, which no update changes, so all trainers share it. Lengths, rewards and entropies were
recorded from a real model (recorded.py): the id of a token determines its recorded entropy. The trainers use the
recorded entropies instead of the model's entropies, but still compute the model's entropies.
"""

from __future__ import annotations

import operator
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.integrations.trl.columns import MayCut, trimmed
from d3s_kernels.integrations.trl.head import d3s_head

from . import inputs
from .recorded import answers, entropy_of, lengths_of_6092, recorded, tokens_of
from .sizes import FULL, Sizes
from .targets import (
    ALL_TOKENS,
    COMPUTED_FROM,
    DEEP_MODEL,
    GRPO,
    GRPO_CUT,
    PREFIXES,
    RECORDED,
    SMALL_MODEL,
    SMALL_VOCABULARY,
    TRL_6092,
)
from .withdrawn import FULL_COMPLETIONS

GRPO_OUR_HEAD = "GRPOTrainer with our LM head"  # shows the head's effect alone
OURS, OURS_PASS = "d3s_kernels", "d3s_kernels, entropy from a pass before"
OURS_ROLLOUTS = "d3s_kernels, all tokens of half of the rollouts"  # shows the effect of rollouts alone
OURS_PREFIXES = f"{OURS}, {PREFIXES}"
OURS_PADDED = f"{ALL_TOKENS}, TRL's rows and columns"  # shows the effect of our LM head alone
GROUP = 8  # rollouts of a prompt, as they were recorded
PAD, EOS = 0, 1


class Shape(NamedTuple):
    """The sizes of a Qwen2 model."""

    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool
    vocabulary: int | None = None  # None: the contest's

    def config(self, vocabulary: int) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary or vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=EOS,
        )


# Qwen2.5's shapes, a small shape, and a deep one with Qwen2.5's vocabulary. Of all weights in matrix products, the LM
# head has 28 % in 0.5B, and 29 % in the small model. In GRPOTrainer's update of the deep model on a CPU, the body makes
# 52 % of the operations: it computes its products once forward and twice backward; TRL's head computes its product four
# times, and on a CPU for all columns.
SHAPES = {
    SMALL_MODEL: Shape(8, 256, 1_024, 4, 2, True, SMALL_VOCABULARY),
    DEEP_MODEL: Shape(32, 192, 2_048, 3, 1, True),
    "0.5B": Shape(24, 896, 4_864, 14, 2, True),
    **{f"7B, {few} layers": Shape(few, 3_584, 18_944, 28, 4, False) for few in COMPUTED_FROM},
}


class Watched(GRPOTrainer):
    """TRL's trainer with the recorded entropies instead of the model's entropies. It records the size of each
    forward.
    """

    generated: dict[str, Tensor]  # what the trainer gets instead of generating

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.forwards: list[tuple[int, int, Tensor]] = []  # rows, columns, and the number of tokens without padding

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *more: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        score = super()._get_per_token_logps_and_entropies
        logprob, entropy, aux = score(model, input_ids, attention_mask, logits_to_keep, *more, **options)
        self.forwards.append((*input_ids.shape, attention_mask.sum()))
        if entropy is not None:  # an entropy is 0 where the head computed nothing
            entropy = entropy_of(input_ids[:, -logits_to_keep:]).where(entropy != 0, 0)
        return logprob, entropy, aux

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self.generated)


class Cut(Watched):
    """TRL's trainer, but each micro-batch is cut to its own longest prompt and completion."""

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        return trimmed(super()._prepare_inputs(generation_batch), None, MayCut(prompts=True, completions=True))


class WatchedD3S(D3STrainer, Watched):
    """Our trainer. It chooses tokens by the recorded entropies."""


class Update:
    """An update. A call returns the loss; it also computes the gradients, and drops them."""

    def __init__(self, name: str, sizes: Sizes, shape: str, lengths: str = RECORDED) -> None:
        self.name, self.trainer, self.kept_by_latest = name, trainer_of(name, sizes, shape), 0
        self.batch = generation_batch(sizes, shape, lengths)

    def kept(self) -> dict[str, Any]:
        """The generation batch with the rollouts that are trained on."""
        if self.name in (GRPO, GRPO_OUR_HEAD):
            return self.batch
        kept: dict[str, Any] = self.trainer._keep_rollouts(dict(self.batch))
        if self.name == OURS_PASS:
            self.trainer._choose_tokens_of_batch(kept)
        return kept

    def __call__(self) -> float:
        trainer, before = self.trainer, self.tokens_kept
        trainer.forwards.clear()
        batch = self.kept()
        with trainer.compute_loss_context_manager(), d3s_head() if self.name == GRPO_OUR_HEAD else nullcontext():
            loss = trainer.compute_loss(trainer.model, batch)
        self.kept_by_latest = self.tokens_kept - before
        loss.backward()
        trainer.model.zero_grad(set_to_none=True)  # so the next call allocates gradients again, which its peak includes
        if not trainer.forwards:
            raise RuntimeError(f"{self.name}: TRL scores tokens in another way, so the model's own entropies counted")
        return loss.item()

    @property
    def tokens_kept(self) -> int:
        """The number of kept tokens, of all calls so far."""
        return int(self.trainer.state.stateful_callbacks.get("D3STrainer", {"num_tokens_kept": 0})["num_tokens_kept"])

    @property
    def forwarded(self) -> list[str]:
        """What the latest call forwarded. If time was up during that call, this is incomplete or empty."""
        return [
            f"{rows} rows x {columns:,} columns, {1 - int(tokens) / (rows * columns):.0%} padding"
            for rows, columns, tokens in self.trainer.forwards
        ]

    @property
    def did(self) -> str:
        """What the latest call forwarded, and what it kept."""
        kept = []
        if isinstance(self.trainer, D3STrainer):
            kept = [f"{self.kept_by_latest:,} of {int(self.batch['num_items_in_batch']):,} tokens kept"]
        return "; ".join([*self.forwarded, *kept])


class Step:
    """An update as TRL's users run it: TRL's loop calls `training_step` for each micro-batch of 8 rollouts. A call
    returns the loss; it also computes the gradients, and drops them. Only the generation is left out.
    """

    def __init__(self, name: str, sizes: Sizes, shape: str, lengths: str) -> None:
        self.trainer = trainer_of(name, sizes, shape, rows=GROUP)
        self.trainer.generated = generation_batch(sizes, shape, lengths)

    def __call__(self) -> float:
        trainer, number = self.trainer, self.trainer.current_gradient_accumulation_steps
        trainer.forwards.clear()
        trainer._metrics["train"].clear()
        trainer._step = 0
        if isinstance(trainer, D3STrainer):
            trainer._begin_step()  # even if the last call was interrupted
        torch.manual_seed(0)  # so TRL shuffles the rollouts alike for all contenders
        losses = []
        for done in range(1, number + 1):
            trainer.accelerator.gradient_state._set_sync_gradients(done == number)
            losses.append(trainer.training_step(trainer.model, [], None))
        trainer.model.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().item()

    @property
    def did(self) -> str:
        """What the latest call forwarded, and what it kept. If time was up during that call, this is incomplete or
        empty.
        """
        if not self.trainer.forwards:
            return ""
        rows, columns, tokens = zip(*self.trainer.forwards, strict=True)
        padding = 1 - int(sum(tokens)) / sum(map(operator.mul, rows, columns))
        each = f"{span(rows)} rows x {span(columns)} columns"
        found = f"{len(rows)} micro-batches of {each}, {padding:.0%} padding"
        kept = self.trainer._metrics["train"].get("d3s/tokens_kept")
        all_tokens = int(self.trainer.generated["num_items_in_batch"])
        return f"{found}; {int(sum(kept)):,} of {all_tokens:,} tokens kept" if kept else found


def span(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


class KnownUpdate(Update):
    """The update alone. Its tokens are chosen beforehand, which is not timed. With `cut`, the forward computes only
    what these tokens need; otherwise, it computes all tokens.
    """

    def __init__(self, sizes: Sizes, shape: str, *, cut: bool) -> None:
        super().__init__(OURS_PASS, sizes, shape)
        if not cut:
            self.trainer._tokens_are_independent = lambda batch: False
        self.chosen = super().kept()

    def kept(self) -> dict[str, Any]:
        return self.chosen


class EntropyPass(Update):
    """The entropy pass over all rollouts, which precedes the choice of tokens. With `every`, all rollouts are computed;
    otherwise, rollouts with advantage 0 are skipped.
    """

    def __init__(self, sizes: Sizes, shape: str, *, every: bool) -> None:
        super().__init__(OURS_PASS, sizes, shape)
        if every:
            self.batch["advantages"] = torch.ones_like(self.batch["advantages"])

    def __call__(self) -> Tensor:
        self.trainer.forwards.clear()
        return self.trainer._entropy_pass(self.batch)["d3s_entropy"]

    @property
    def did(self) -> str:
        return "; ".join(self.forwarded)


def shape_and_sizes(number: int, sizes: Sizes) -> tuple[str, Sizes]:
    """The shape and the sizes of an update in this number of micro-batches. On a CPU, answers have their recorded
    lengths.
    """
    sizes = replace(sizes, rollouts=number * GROUP)
    if inputs.device.type == "cuda":
        return "0.5B", sizes
    if sizes.completion < FULL.completion:
        return SMALL_MODEL, sizes
    return DEEP_MODEL, replace(sizes, completion=recorded()["limit"])


@lru_cache(maxsize=2)
def model_of(vocabulary: int, shape: str) -> Qwen2ForCausalLM:
    """The model, created on its device and in its precision: drawing its weights on a CPU would take a minute."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if inputs.device.type == "cuda" else torch.float32)
    try:
        with inputs.device:
            return Qwen2ForCausalLM(SHAPES[shape].config(vocabulary))
    finally:
        torch.set_default_dtype(before)


def trainer_of(name: str, sizes: Sizes, shape: str, rows: int | None = None, **changed: Any) -> Watched:
    """A trainer whose micro-batches have this number of rows; None: all rollouts."""
    on_gpu = inputs.device.type == "cuda"
    model = model_of(sizes.vocabulary, shape)
    common: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/d3s-trl",
        "per_device_train_batch_size": rows or sizes.rollouts,
        "gradient_accumulation_steps": sizes.rollouts // (rows or sizes.rollouts),
        "num_generations": GROUP,
        "max_completion_length": sizes.completion,
        "max_steps": 1,
        "report_to": [],
        "use_cpu": not on_gpu,
        "bf16": False,
        "gradient_checkpointing": on_gpu,
    }
    if name in (GRPO, GRPO_OUR_HEAD, GRPO_CUT):
        kind, arguments = Cut if name == GRPO_CUT else Watched, GRPOConfig(**common)
    elif name in (ALL_TOKENS, OURS_PADDED):
        order = "none" if name == OURS_PADDED else "auto"
        kind, arguments = WatchedD3S, D3SConfig(keep_all=True, order_rows=order, **common)
    elif name == OURS_PREFIXES:
        kind, arguments = WatchedD3S, D3SConfig(token_rule="prefix", rollouts_start=1.0, rollouts_end=1.0, **common)
    else:
        tokens = 1.0 if name == OURS_ROLLOUTS else 0.1
        ours = {"token_ratio_start": tokens, "token_ratio_end": tokens, "rollouts_start": 0.5, "rollouts_end": 0.5}
        source = "rollout" if name == OURS_PASS else "update"
        kind, arguments = WatchedD3S, D3SConfig(entropy_from=source, **common, **ours | changed)
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
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def generation_batch(sizes: Sizes, shape: str, lengths: str = RECORDED) -> dict[str, Tensor]:
    """A batch as TRL's generation makes it: prompts of up to 16 tokens, and recorded answers, padded to the longest."""
    random = torch.Generator().manual_seed(1)
    rows, vocabulary = sizes.rollouts, SHAPES[shape].vocabulary or sizes.vocabulary
    prompts, given = torch.randint(8, 17, (rows,), generator=random), None
    if lengths == FULL_COMPLETIONS:
        given = torch.full((rows,), sizes.completion)
    elif lengths == TRL_6092:
        prompts, given = lengths_of_6092(rows, sizes.completion, random)
    drawn = answers(rows, sizes.completion, given)
    columns, widest = int(drawn.mask.sum(1).amax()), int(prompts.amax())
    mask = drawn.mask[:, :columns]
    batch = {
        "prompt_ids": torch.randint(2, vocabulary, (rows, widest), generator=random),
        "prompt_mask": (torch.arange(widest) >= widest - prompts.unsqueeze(1)).long(),
        "completion_ids": tokens_of(drawn.levels[:, :columns], vocabulary, random).where(mask, PAD),
        "completion_mask": mask.long(),
        "advantages": drawn.advantages,
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(inputs.device) for name, value in batch.items()}
