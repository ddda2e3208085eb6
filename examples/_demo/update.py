"""One update of TRL's GRPOTrainer, or of D3STrainer, on recorded rollouts: what it keeps, costs and computes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import d3s_kernels as d3s
from d3s_kernels.integrations.trl import D3SConfig, D3STrainer
from d3s_kernels.integrations.trl.head import d3s_head

from .costs import Costs
from .problems import is_right
from .rollouts import Recorded

SCORING, UPDATE = "scoring", "update"
MICRO_BATCHES = 2  # all rollouts of a generation batch, and those that D3S keeps, are a multiple of it


@dataclass(frozen=True)
class Update:
    batch: dict[str, Tensor]  # the batch that the trainer trained on: the kept rollouts, with a mask of the kept tokens
    gradient: list[Tensor]
    costs: Costs
    logged: dict[str, float]


def grpo(model: Any, tokenizer: Any, recorded: Recorded, advance: Callable[[], None], our_head: bool = False) -> Update:
    """GRPO's update with TRL's LM head, or with ours. The difference is what our head saves without any selection."""
    with d3s_head() if our_head else contextlib.nullcontext():
        return _update(GRPOTrainer, GRPOConfig, {}, model, tokenizer, recorded, advance)


def with_d3s(model: Any, tokenizer: Any, recorded: Recorded, budget: d3s.Budget, advance: Callable[[], None]) -> Update:
    """The update at one point of the schedule, whose budget is the same from start to end here."""
    options = {
        "rollouts_start": budget.rollouts,
        "rollouts_end": budget.rollouts,
        "token_ratio_start": budget.token_ratio,
        "token_ratio_end": budget.token_ratio,
        "entropy_from": "rollout",  # tokens are chosen once, over all kept rollouts, before the update
    }
    return _update(D3STrainer, D3SConfig, options, model, tokenizer, recorded, advance)


def _update(
    kind: type[GRPOTrainer],
    config: type[GRPOConfig],
    options: dict[str, Any],
    model: Any,
    tokenizer: Any,
    recorded: Recorded,
    advance: Callable[[], None],
) -> Update:
    rows = len(recorded.completions)
    questions = Dataset.from_list([{"prompt": problem.chat, "answer": problem.answer} for problem in recorded.problems])
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            folder,
            num_generations=recorded.group,
            per_device_train_batch_size=rows // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=1,
            max_grad_norm=0.0,  # no clipping, so that the gradient is that of the loss
            optim="sgd",  # without a state, which would be most of the memory
            shuffle_dataset=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=model.device.type == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            **options,
        )
        trainer = kind(
            model,
            reward,
            arguments,
            train_dataset=questions,
            processing_class=tokenizer,
            rollout_func=recorded.generated,
        )
        trainer.remove_callback(PrinterCallback)
        watch = _Watch(trainer, advance)
        trainer.add_callback(watch)
        trainer.train()
    (logged,) = (row for row in trainer.state.log_history if "reward" in row)
    return Update(watch.batch, watch.gradient, watch.costs, logged)


def reward(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    texts = [messages[0]["content"] for messages in completions]
    return [float(is_right(text, right)) for text, right in zip(texts, answer, strict=True)]


class _Watch(TrainerCallback):
    """Measures the scoring (rewards, advantages, choice of rollouts and tokens) and the update (forward and backward),
    and keeps the gradient.
    """

    def __init__(self, trainer: GRPOTrainer, advance: Callable[[], None]) -> None:
        self.costs = Costs()
        self._update = contextlib.ExitStack()
        self._advance = advance
        score = trainer._generate_and_score_completions

        def scored(inputs: Any) -> Any:
            with self.costs.of(SCORING):
                self.batch = score(inputs)
            self._update.enter_context(self.costs.of(UPDATE))
            return self.batch

        trainer._generate_and_score_completions = scored

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._advance()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self._update.close()
        self._advance()
        self.gradient = [parameter.grad for parameter in model.parameters()]
