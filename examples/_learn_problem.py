"""The task to learn and the model to start from: the example's own, or the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _learn_task as task
import datasets
import torch
from _learn_setting import Setting
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LARGEST_SHARE_HELD_OUT = 0.5
SPLIT_SEED = 0  # all runs hold out the same prompts, whatever their seed


@dataclass(frozen=True)
class Problem:
    tokenizer: PreTrainedTokenizerBase
    train: datasets.Dataset  # columns prompt and answer
    held_out: datasets.Dataset


def problem(setting: Setting) -> Problem:
    """The tokenizer and the data sets for training and evaluation.

    Raises:
        ValueError: the data set cannot be used; the message names the option.
    """
    if setting.model is None:
        return Problem(task.new_tokenizer(), *split(task.table(), setting.held_out))
    tokenizer = AutoTokenizer.from_pretrained(setting.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Problem(tokenizer, *split(read(setting.dataset, setting.work), setting.held_out))


def read(path: Path, work: Path) -> datasets.Dataset:
    kind = "parquet" if path.suffix == ".parquet" else "json"
    try:
        table = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(work / "data"))
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"--dataset: could not read {path} as {kind}: {error.__cause__ or error}") from error
    missing = {"prompt", "answer"} - set(table.column_names)
    if missing:
        raise ValueError(
            f"--dataset: {path} has the columns {', '.join(table.column_names)}; takes prompt and answer "
            f"(missing: {', '.join(sorted(missing))})"
        )
    return table.select_columns(["prompt", "answer"])


def split(table: datasets.Dataset, held_out: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    most = int(LARGEST_SHARE_HELD_OUT * len(table))
    if held_out > most:
        raise ValueError(f"--held-out: got {held_out}; takes at most {most}, half of the data set's {len(table)} rows")
    table = table.shuffle(seed=SPLIT_SEED)
    return table.select(range(held_out, len(table))), table.select(range(held_out))


def warmed_up(setting: Setting, seed: int) -> Path:
    """The folder of the model that every arm starts from with this seed."""
    return setting.model or setting.work / f"warmed-up-{seed}"


def warm_up(setting: Setting, seed: int, stepped: Callable[[int], None]) -> None:
    """Makes and saves this model for the example's own task; calls `stepped` after every step."""
    torch.manual_seed(seed)
    own = problem(setting)
    model = task.new_model(own.tokenizer)
    for _ in task.warm_up(model, own.tokenizer, own.train, seed, setting.warm_up_steps):
        stepped(1)
    model.save_pretrained(warmed_up(setting, seed))


def start_model(setting: Setting, seed: int) -> PreTrainedModel:
    """The model to start from, in float32, which small updates need. GPUs with bfloat16 compute in it by autocast."""
    model = AutoModelForCausalLM.from_pretrained(warmed_up(setting, seed), dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
