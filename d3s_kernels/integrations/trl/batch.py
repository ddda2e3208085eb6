"""Selects, joins, pads and moves the rows of TRL's generation batch.

A batch is a dictionary. It has tensors of tokens, with one row for each rollout, and scalars; it may also have images.
Each rank holds consecutive rows of the whole batch. The rows of a group are consecutive too, but they may lie on two
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ...support.recorder import NO_TOKEN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Batch = dict[str, Any]
SHARED = "d3s_shared"  # a batch field: the tokens that drop_shared_tokens leaves out
SETS = "d3s_sets"  # a batch field: the set that each completion token was drawn from, int32 [rows, tokens, width]
# Batch fields of sequences that are cut at random: each row's random number, and the fields of d3s_kernels.Prefixes.
DRAWS, PREFIX, PREFIX_WEIGHT = "d3s_draws", "d3s_prefix", "d3s_prefix_weight"
UNMEASURED = "d3s_unmeasured"  # a batch field: marks the tokens whose entropy no pass has computed

PROMPT = {"prompt_ids", "prompt_mask"}  # padded on the left
COMPLETION = {  # padded on the right
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
    "d3s_entropy", "d3s_logprob", "d3s_kept", "d3s_trusted", "d3s_weight",
    PREFIX, PREFIX_WEIGHT, UNMEASURED, SHARED, SETS,
}  # fmt: skip
BOTH = {"token_type_ids", "mm_token_type_ids"}
IMAGES = (  # further arguments of TRL's method that scores tokens
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
FIELDS = {"advantages", "num_items_in_batch", *PROMPT, *COMPLETION, *BOTH, *IMAGES}


def loss_mask(batch: Batch) -> Tensor:
    """Returns the mask of TRL's loss: the tokens of the completions, except tool tokens."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def _has_rows(value: Any) -> bool:
    return value is not None and not (isinstance(value, Tensor) and value.dim() == 0)


def take(batch: Batch, rows: Tensor) -> Batch:
    """Returns the given rows of a batch, with the images of these rows."""

    def taken(value: Any) -> Any:
        if not _has_rows(value):
            return value
        return value[rows] if isinstance(value, Tensor) else [value[row] for row in rows.tolist()]

    by_rollout = split_pixel_values_by_grid(batch)
    merged: Batch = unsplit_pixel_values_by_grid({name: taken(value) for name, value in by_rollout.items()})
    return merged


def keep_rollouts(batch: Batch, kept: Tensor, pad_token: int, process_group: ProcessGroup | None) -> Batch:
    """Returns a batch of the kept rows, with the same number of rows on every rank. A rank that has more kept rows than
    this number sends some of them to other ranks, from device to device. The total number of kept rows must be a
    multiple of the number of ranks. Rows with images cannot move. ``process_group`` is None if there is only one
    process.
    """
    if process_group is None:
        return take(batch, kept.nonzero()[:, 0])
    from ..._collectives import ranks_of
    from ...distributed import exchange_rows, plan_rows

    plan = plan_rows(kept, process_group)
    if plan.moved == 0:
        return take(batch, plan.staying)
    rows = _tensors_with_rows(batch)
    sizes = torch.tensor(_sizes(rows), device=kept.device)
    widest = ranks_of(process_group).gather(sizes).amax(dim=0).tolist()
    return batch | exchange_rows(_at_sizes(rows, widest, pad_token), plan, process_group)


def joined(batch: Batch, more: Batch, pad_token: int) -> Batch:
    """Concatenates the rows of two batches without images; the rows of ``more`` come last."""
    first, second = _tensors_with_rows(batch), _tensors_with_rows(more)
    widest = [max(pair) for pair in zip(_sizes(first), _sizes(second), strict=True)]
    first, second = (_at_sizes(rows, widest, pad_token) for rows in (first, second))
    return batch | {name: torch.cat([first[name], second[name]]) for name in first}


def _tensors_with_rows(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors that have one row for each rollout, sorted by name, so that the order is the same in all
    batches.
    """
    return {name: value for name, value in sorted(batch.items()) if isinstance(value, Tensor) and value.dim() > 0}


def _sizes(rows: dict[str, Tensor]) -> list[int]:
    """Returns each tensor's sizes without the number of rows: the number of tokens and, for the sets, their width."""
    return [size for value in rows.values() for size in value.shape[1:]]


def _at_sizes(rows: dict[str, Tensor], sizes: Iterable[int], pad_token: int) -> dict[str, Tensor]:
    """Pads each tensor to its size in ``sizes``, which has the order of :func:`_sizes`. The padding is on the same side
    as in TRL.
    """
    wanted = iter(sizes)
    fillers = {"prompt_ids": pad_token, "completion_ids": pad_token, "importance_sampling_ratio": 1, SETS: NO_TOKEN}

    def padded(name: str, value: Tensor) -> Tensor:
        missing = [next(wanted) - size for size in value.shape[1:]]
        # pad() takes a pair (before, after) for each dimension, the last dimension first.
        around = [side for n in reversed(missing) for side in ((n, 0) if name in PROMPT else (0, n))]
        return pad(value, around, value=fillers.get(name, 0))

    return {name: padded(name, value) for name, value in rows.items()}


def concatenated(parts: list[Batch]) -> Batch:
    """Returns one batch with the rows and images of several batches, which have the same columns."""
    by_rollout = [split_pixel_values_by_grid(part) for part in parts]

    def together(values: list[Any]) -> Any:
        if not _has_rows(values[0]):
            return values[0]
        return torch.cat(values) if isinstance(values[0], Tensor) else [row for value in values for row in value]

    merged: Batch = unsplit_pixel_values_by_grid(
        {name: together([part[name] for part in by_rollout]) for name in by_rollout[0]}
    )
    return merged


def both_sides(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the ids of prompts with their completions, and their attention mask."""
    ids, mask = (torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))
    return ids, mask
