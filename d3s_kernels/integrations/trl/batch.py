"""TRL's generation batch: on which side each field is padded, how to take rows, and how to move rows between ranks.

The batch is a dictionary: token tensors with a row for each rollout, images, and numbers. Each rank holds consecutive
rows of the whole batch, and each group is consecutive rows too; a group may lie on two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ...recorder import NO_TOKEN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Batch = dict[str, Any]
SETS = "d3s_sets"  # a field: int32 [rows, tokens, width], the set that each token of the completions was drawn from

_PROMPT = {"prompt_ids", "prompt_mask"}  # padded on the left
_COMPLETION = {  # padded on the right
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "d3s_entropy", SETS,
}  # fmt: skip
_BOTH = {"token_type_ids", "mm_token_type_ids"}
IMAGES = (  # further arguments of the method that scores tokens
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
FIELDS = {"advantages", "num_items_in_batch", *_PROMPT, *_COMPLETION, *_BOTH, *IMAGES}


def loss_mask(batch: Batch) -> Tensor:
    """The mask of TRL's loss: the completion's tokens except tool tokens."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def take(batch: Batch, rows: Tensor) -> Batch:
    """These rows of a batch, with their images."""
    picked = {name: _rows(value, rows) for name, value in split_pixel_values_by_grid(batch).items()}
    merged: Batch = unsplit_pixel_values_by_grid(picked)
    return merged


def _rows(value: Any, rows: Tensor) -> Any:
    if value is None or (isinstance(value, Tensor) and value.dim() == 0):
        return value
    return value[rows] if isinstance(value, Tensor) else [value[row] for row in rows.tolist()]


def keep_rollouts(batch: Batch, kept: Tensor, pad_token: int, process_group: ProcessGroup | None) -> Batch:
    """The kept rows, the same number on every rank: ranks with too many send rows to ranks with too few, from device
    to device.

    Args:
        batch: this rank's rows. If any rows move, no rank's rows may have images.
        kept: bool, marks the kept rows. Over all ranks their number is a multiple of the number of ranks.
        process_group: all ranks, or None for a single process.
    """
    if process_group is None:
        return take(batch, kept.nonzero()[:, 0])
    from ...distributed import exchange_rows, plan_rows

    plan = plan_rows(kept, process_group)
    if plan.moved == 0:
        return take(batch, plan.staying)
    rows = {name: value for name, value in batch.items() if _has_rows(value)}
    return batch | exchange_rows(_widened(rows, pad_token, process_group), plan, process_group)


def _widened(rows: dict[str, Tensor], pad_token: int, process_group: ProcessGroup) -> dict[str, Tensor]:
    """Pads each tensor to its largest width over all ranks; the sets also in the number of their tokens."""
    from ..._groups import ranks_of

    sizes = torch.tensor(_sizes(rows), device=rows["prompt_ids"].device)
    return _at_sizes(rows, ranks_of(process_group).gather(sizes).amax(dim=0).tolist(), pad_token)


def _wide(rows: dict[str, Tensor]) -> list[str]:
    return sorted(name for name, value in rows.items() if value.dim() > 1)


def _sizes(rows: dict[str, Tensor]) -> list[int]:
    return [size for name in _wide(rows) for size in rows[name].shape[1:]]


def _at_sizes(rows: dict[str, Tensor], sizes: Iterable[int], pad_token: int) -> dict[str, Tensor]:
    """Pads the tensors to these sizes, on the side on which TRL pads them."""
    wanted = iter(sizes)
    fillers = {"prompt_ids": pad_token, "completion_ids": pad_token, "importance_sampling_ratio": 1, SETS: NO_TOKEN}

    def padded(name: str) -> Tensor:
        missing = [next(wanted) - size for size in rows[name].shape[1:]]
        # pad() takes a pair (before, after) for each dimension, the last dimension first.
        around = [side for n in reversed(missing) for side in ((n, 0) if name in _PROMPT else (0, n))]
        return pad(rows[name], around, value=fillers.get(name, 0))

    return rows | {name: padded(name) for name in _wide(rows)}


def joined(batch: Batch, more: Batch, pad_token: int) -> Batch:
    """Concatenates the rows of two batches without images; those of ``more`` come last."""
    both = [{name: part for name, part in of.items() if _has_rows(part)} for of in (batch, more)]
    sizes = [max(pair) for pair in zip(*map(_sizes, both), strict=True)]
    first, second = (_at_sizes(rows, sizes, pad_token) for rows in both)
    return batch | {name: torch.cat([first[name], second[name]]) for name in first}


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def trimmed(batch: Batch, multiple: int | None) -> Batch:
    """Cuts the outer columns that are padding in every row: the longest prompt or completion may have been dropped.
    At least two completion columns stay: TRL's metrics read a single column as one value for each sequence.

    Positions count from a row's first column, including padding. So a cut on the left shifts all positions by the same
    number, which does not matter to rotary embeddings: they depend only on differences of positions.
    """
    prompt = _width(batch["prompt_mask"].flip(1), multiple)
    completion = max(_width(batch["completion_mask"], multiple), min(2, batch["completion_mask"].shape[1]))
    before = batch["prompt_ids"].shape[1] - prompt

    def cut(name: str, value: Any) -> Any:
        if name in _PROMPT:
            return value[:, before:]
        if name in _BOTH:
            return value[:, before : before + prompt + completion]
        return value[:, :completion] if name in _COMPLETION else value

    return {name: cut(name, value) for name, value in batch.items()}


def _width(mask: Tensor, multiple: int | None) -> int:
    """Columns up to the last one with a token, at least one, rounded up to a multiple."""
    columns = last_column(mask)
    return columns if multiple is None else min(mask.shape[1], -(-columns // multiple) * multiple)


def last_column(mask: Tensor) -> int:
    """The number of columns up to the last one that is set in any row; at least one."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return max(1, int((mask.any(dim=0) * places).amax()))
