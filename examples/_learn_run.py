"""One run: trains a model with an arm's trainer and options, and evaluates it at regular steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from _learn_arms import Arm
from _learn_evaluate import held_out_reward
from _learn_phases import ASIDE, PHASES, Stopwatch, watch
from _learn_problem import Problem, problem, start_model
from _learn_reward import reward
from _learn_setting import Job, Point, Run, Setting
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARM_UP_OF_THE_RATE = 0.05  # share of the steps; keeps Adam's first updates small, which depend only on signs


def train(setting: Setting, arm: Arm, job: Job, stepped: Callable[[int], None]) -> Run:
    """Trains and evaluates one model; calls `stepped` after every optimiser step."""
    own = problem(setting)
    trainer = new_trainer(setting, arm, job, own)
    record = Record(setting, own, trainer, stepped)
    trainer.add_callback(record)
    trainer.train()
    run = Run(job, tuple(record.points))
    del trainer, record
    release()
    return run


def release() -> None:
    """Frees the trainer's memory for the next run in this process: reference cycles keep it alive until collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def new_trainer(setting: Setting, arm: Arm, job: Job, own: Problem) -> GRPOTrainer:
    trainer_class, config_class = GRPOTrainer, GRPOConfig
    if arm.d3s:  # imported here, since GRPO's arm does not need it
        from d3s_kernels.integrations.trl import D3SConfig, D3STrainer

        trainer_class, config_class = D3STrainer, D3SConfig
    config = config_class(
        output_dir=str(setting.work / "trainer"),
        seed=job.seed,
        learning_rate=job.learning_rate,
        **shared(setting),
        **arm.options,
    )
    model = start_model(setting, job.seed)
    trainer = trainer_class(
        model=model, reward_funcs=reward, args=config, train_dataset=own.train, processing_class=own.tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def shared(setting: Setting) -> dict[str, Any]:
    """The TRL options that all arms share; all others have TRL's defaults (gradients are clipped at norm 1)."""
    on_gpu = torch.cuda.is_available()
    return {
        "max_steps": setting.steps,
        "num_generations": setting.group,
        "max_completion_length": setting.completion,
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": setting.accumulated,
        "steps_per_generation": setting.steps_per_batch * setting.accumulated,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": max(1, round(WARM_UP_OF_THE_RATE * setting.steps)),
        "gradient_checkpointing": on_gpu,
        "use_cpu": not on_gpu,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


class Record(TrainerCallback):
    """Evaluates the model during training, and stores the points of the curves."""

    def __init__(self, setting: Setting, own: Problem, trainer: GRPOTrainer, stepped: Callable[[int], None]) -> None:
        self.setting, self.problem, self.stepped = setting, own, stepped
        self.points: list[Point] = []
        self.tokens = 0
        self.stopwatch = Stopwatch()
        watch(trainer, self.stopwatch)
        count_tokens(trainer, self)

    def on_train_begin(self, *_: object, model: Any, **__: object) -> None:
        self.stopwatch.restart()
        self.evaluate(0, model)

    def on_log(self, _: object, state: Any, __: object, logs: dict[str, float], model: Any, **___: object) -> None:
        """Called after every step's log, so that an evaluation has the values that the step logged."""
        if "grad_norm" not in logs:  # the summary at the end
            return
        self.tokens = int(logs.get("d3s/num_tokens_kept", self.tokens))
        self.stepped(1)
        if state.global_step % self.setting.evaluate_every == 0 or state.global_step == self.setting.steps:
            self.evaluate(state.global_step, model)

    def evaluate(self, step: int, model: Any) -> None:
        with self.stopwatch.phase(ASIDE):
            value = held_out_reward(model, self.problem, self.setting.completion, self.setting.rollouts)
        seconds = {phase: self.stopwatch.seconds[phase] for phase in PHASES}
        self.points.append(Point(step, value, self.tokens, seconds))


def count_tokens(trainer: GRPOTrainer, record: Record) -> None:
    """Counts every token of a batch as one with a gradient, unless the trainer logs the number of kept tokens."""
    compute_loss = trainer._compute_loss

    def counted(model: Any, inputs: dict[str, Any]) -> Any:
        if model.training:
            record.tokens += int(inputs["completion_mask"].sum())
        return compute_loss(model, inputs)

    trainer._compute_loss = counted
