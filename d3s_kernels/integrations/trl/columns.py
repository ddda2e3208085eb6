"""The columns of a batch that rows need: rows are ordered by their lengths, and each part is cut to its own columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...micro_batches import MicroBatch, micro_batches
from .batch import BOTH, COMPLETION, PROMPT, Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_RELATIVE = {"full_attention", "sliding_attention"}  # over all earlier columns, or over a window of them
_BY_LENGTH = {"dynamic", "longrope"}  # rotary embeddings that change if a forward has more columns than a limit


class MayCut(NamedTuple):
    """Which padding may be cut off without an effect on the scores of tokens, other than rounding."""

    prompts: bool  # on the left; this shifts the positions of all tokens
    completions: bool  # on the right


def may_cut(config: Any, columns: int) -> MayCut:
    """Returns which padding of ``columns`` columns may be cut off, for a model with this text configuration.

    A causal model's token does not see what is on its right. A cut on the left shifts all positions by the same amount.
    Rotary embeddings and attention over earlier columns depend only on differences of positions. Other models may learn
    an embedding for each position, or attend within fixed chunks of columns; so padding on the left stays, unless the
    configuration says that the model is one of the first kind. Above :func:`limit_of_columns`, nothing is cut off.
    """
    limit, rotary = limit_of_columns(config), _rotary_embeddings(config)
    if limit is not None and columns > limit:
        return MayCut(prompts=False, completions=False)
    scaled = any("llama_4_scaling_beta" in each for each in rotary)  # queries grow with their position
    layers = set(getattr(config, "layer_types", None) or _RELATIVE)
    return MayCut(prompts=bool(rotary) and not scaled and layers <= _RELATIVE, completions=True)


def limit_of_columns(config: Any) -> int | None:
    """Returns the number of columns above which the model's rotary embeddings depend on this number, or None."""
    for each in _rotary_embeddings(config):
        if each.get("rope_type", each.get("type")) in _BY_LENGTH:
            names = "original_max_position_embeddings", "max_position_embeddings"
            limits = [each.get(names[0]), *(getattr(config, name, None) for name in names)]
            return next((limit for limit in limits if limit is not None), 0)
    return None


def _rotary_embeddings(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of the model's rotary embeddings, which may be several for different layers. An older
    configuration has only their base.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, dict)]
    base = getattr(config, "rope_theta", None)
    return by_layer or [parameters or {"rope_theta": base}] if parameters or base is not None else []


def by_work(
    lengths: Tensor,
    number: int,
    prompt: int,
    cuts: MayCut,
    multiple: int | None,
    process_group: ProcessGroup | None = None,
) -> list[MicroBatch]:
    """Divides rows into micro-batches of equal work. ``lengths`` is from :func:`row_lengths`, or has lower lengths for
    rows that need fewer columns. If prompts may not be cut, all rows have their ``prompt`` columns.
    """
    prompts = lengths[0] if cuts.prompts else torch.full_like(lengths[0], prompt)
    return micro_batches(
        lengths[1], number, prompt_lengths=prompts, multiple_of=multiple or 1, process_group=process_group
    )


def last_columns(mask: Tensor) -> Tensor:
    """Returns int64 ``[rows]``: the number of columns up to the last one that is set in the row; 0 if there is none."""
    return ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)


def row_lengths(batch: Batch) -> Tensor:
    """Returns int64 ``[2, rows]``: for each row, the number of columns from its prompt's first token on, and the number
    of columns up to its completion's last token.
    """
    return torch.stack([last_columns(batch["prompt_mask"].flip(1)), last_columns(batch["completion_mask"])])


def trimmed(batch: Batch, multiple: int | None, cuts: MayCut) -> Batch:
    """Removes the outer columns that are padding in every row, for instance after the longest prompt was dropped."""
    return all_trimmed([batch], [row_lengths(batch)], multiple, cuts)[0]


def all_trimmed(batches: list[Batch], lengths: list[Tensor], multiple: int | None, cuts: MayCut) -> list[Batch]:
    """Trims each batch to its own columns. ``lengths`` is from :func:`row_lengths`. The host waits once."""
    if not cuts.completions:
        return batches
    step, found = multiple or 1, []
    for batch, widths in zip(batches, torch.stack([each.amax(dim=1) for each in lengths]).tolist(), strict=True):
        prompt, completion = (-(-width // step) * step for width in widths)
        found.append(cut(batch, prompt if cuts.prompts else batch["prompt_mask"].shape[1], completion))
    return found


def cut(batch: Batch, prompt: int, completion: int) -> Batch:
    """Returns the batch with the last ``prompt`` columns of prompts, and the first ``completion`` columns of
    completions. At least one column of prompts stays, to predict the first token. At least two columns of completions
    stay, because TRL's metrics would read a single column as one value per sequence.

    A token's position is the index of its column, so a cut on the left shifts all positions by the same amount. Rotary
    embeddings depend only on differences of positions, so the shift has no effect.
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
