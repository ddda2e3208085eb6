"""Cuts batches to the columns that their rows need: rows are ordered by length, and each part is cut to its own
columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...rollouts.micro_batches import MicroBatch, micro_batches
from .batch import BOTH, COMPLETION, PROMPT, Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Types of models whose tokens see only differences of positions: they have rotary embeddings, and attention over all
# earlier columns or over a window of them. tests/trainers/test_trl_columns.py runs each with and without padding.
RELATIVE = {
    "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3",
    "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
}  # fmt: skip
_BY_LENGTH = {"dynamic", "longrope"}  # rotary embeddings that change if a forward has more columns than a limit


class MayCut(NamedTuple):
    """Which padding may be cut off without an effect on the scores of tokens, other than rounding."""

    prompts: bool  # on the left; this shifts the positions of all tokens
    completions: bool  # on the right


def what_may_be_cut(config: Any, columns: int) -> MayCut:
    """Returns which padding of ``columns`` columns may be cut off, for a model with this text configuration.

    A causal model's token does not see what is on its right. A cut on the left shifts all positions by the same amount.
    Some models learn an embedding for each position, scale queries by their position, or attend within fixed chunks of
    columns. So prompts are cut only for the types of models in ``RELATIVE``. Nothing is cut off if the number of
    columns reaches :func:`limit_of_columns`.
    """
    limit = limit_of_columns(config)
    if limit is not None and columns >= limit:
        return MayCut(prompts=False, completions=False)
    return MayCut(prompts=config.model_type in RELATIVE, completions=True)


def limit_of_columns(config: Any) -> int | None:
    """Returns a limit, or None. If a forward has at least this number of columns, the model's rotary embeddings may
    depend on the number of columns.
    """
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [each for each in rotary.values() if isinstance(each, dict)]  # one for each kind of layer
    for each in by_layer or [rotary]:
        if each.get("rope_type", each.get("type")) in _BY_LENGTH:
            names = "original_max_position_embeddings", "max_position_embeddings"
            limits = [each.get(names[0]), *(getattr(config, name, None) for name in names)]
            return next((limit for limit in limits if limit is not None), 0)
    return None


def divided_by_work(
    lengths: Tensor,
    number: int,
    prompt: int,
    may_cut: MayCut,
    multiple: int | None,
    process_group: ProcessGroup | None = None,
) -> list[MicroBatch]:
    """Divides rows into micro-batches of equal work. ``lengths`` is from :func:`row_lengths`, or has smaller numbers
    for rows that need fewer columns. If prompts may not be cut, every row has all ``prompt`` columns.
    """
    prompts = lengths[0] if may_cut.prompts else torch.full_like(lengths[0], prompt)
    return micro_batches(
        lengths[1], number, prompt_lengths=prompts, multiple_of=multiple or 1, process_group=process_group
    )


def last_columns(mask: Tensor) -> Tensor:
    """Returns int64 ``[rows]``: for each row of the mask, the number of columns up to the last set one; 0 if no column
    is set.
    """
    return ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)


def row_lengths(batch: Batch) -> Tensor:
    """Returns int64 ``[2, rows]``: for each row, the number of columns from its prompt's first token on, and the number
    of columns up to its completion's last token.
    """
    return torch.stack([last_columns(batch["prompt_mask"].flip(1)), last_columns(batch["completion_mask"])])


def trimmed(batch: Batch, multiple: int | None, may_cut: MayCut) -> Batch:
    """Removes the outer columns that are padding in every row, for instance after the longest prompt was dropped."""
    return all_trimmed([batch], [row_lengths(batch)], multiple, may_cut)[0]


def all_trimmed(batches: list[Batch], lengths: list[Tensor], multiple: int | None, may_cut: MayCut) -> list[Batch]:
    """Trims each batch to its own columns. ``lengths`` is from :func:`row_lengths`. There is one host sync."""
    if not may_cut.completions:
        return batches
    step, found = multiple or 1, []
    for batch, widths in zip(batches, torch.stack([each.amax(dim=1) for each in lengths]).tolist(), strict=True):
        prompt, completion = (-(-width // step) * step for width in widths)
        found.append(cut(batch, prompt if may_cut.prompts else batch["prompt_mask"].shape[1], completion))
    return found


def cut(batch: Batch, prompt: int, completion: int) -> Batch:
    """Returns the batch with the last ``prompt`` columns of prompts, and the first ``completion`` columns of
    completions. At least one column of prompts stays, to predict the first token. At least two columns of completions
    stay, because TRL's metrics would read a single column as one value per sequence.
    """
    all_prompt, all_completion = batch["prompt_mask"].shape[1], batch["completion_mask"].shape[1]
    prompt, completion = min(max(prompt, 1), all_prompt), min(max(completion, 2), all_completion)
    before = all_prompt - prompt

    def of_field(name: str, value: Any) -> Any:
        if name in PROMPT:
            return value[:, before:]
        if name in BOTH:
            return value[:, before : before + prompt + completion]
        return value[:, :completion] if name in COMPLETION else value

    return {name: of_field(name, value) for name, value in batch.items()}
