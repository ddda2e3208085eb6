"""Which rollouts of TRL's generation batch are trained on, and on which rank.

TRL's generation batch is a dictionary: token tensors with a row for each rollout, images, and numbers. The rollouts of
all ranks, rank after rank, are the groups one after another; a group may lie on two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ...rollouts import max_variance_select
from ...tokens import topk_mask

Batch = dict[str, Any]

_PROMPT = {"prompt_ids", "prompt_mask"}  # padded on the left
_COMPLETION = {  # padded on the right
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "d3s_entropy",
}  # fmt: skip
_BOTH = {"token_type_ids", "mm_token_type_ids"}


def rows_to_keep(groups: int, n: int, keep: int, multiple: int) -> tuple[int, int]:
    """Rollouts that a budget asks for, with ``keep`` of each group clamped to [2, n]; and rounded up to a multiple."""
    asked = min(max(keep, 2), n) * groups
    return asked, min(groups * n, -(-asked // multiple) * multiple)


def choose_rollouts(advantages: Tensor, keep: int, scope: str, multiple: int, ranks: int | None = None) -> Tensor:
    """Marks ``keep`` rollouts for each group, and as many more as it takes to reach a multiple of ``multiple``.

    Args:
        advantages: ``[groups, n]``.
        keep: clamped to [2, n].
        scope: "batch" pools all groups; "group" keeps the same number of each, and one more of those with the widest
            spread where the multiple asks for it.
        multiple: divides ``groups * n``.
        ranks: where given, each rank's share is chosen from its own rows, so that no rollout has to move; from its own
            groups, if scope is "group" and no group lies on two ranks.

    Returns:
        bool ``[groups * n]``.
    """
    groups, n = advantages.shape
    _, total = rows_to_keep(groups, n, keep, multiple)
    if ranks is not None and scope == "group" and groups % ranks == 0:
        return torch.cat([choose_rollouts(own, keep, scope, multiple // ranks) for own in advantages.chunk(ranks)])
    if ranks is not None:
        return max_variance_select(advantages.reshape(ranks, -1), total // ranks).flatten()
    if scope == "batch":
        return max_variance_select(advantages.flatten(), total)
    each, more = divmod(total, groups)
    kept = max_variance_select(advantages, each)
    if more:
        widest = topk_mask(advantages.var(dim=1), k=more)
        kept = torch.where(widest[:, None], max_variance_select(advantages, each + 1), kept)
    return kept.flatten()


def take(batch: Batch, rows: Tensor) -> Batch:
    """These rows of a batch, with their images."""
    picked = {name: _rows(value, rows) for name, value in split_pixel_values_by_grid(batch).items()}
    merged: Batch = unsplit_pixel_values_by_grid(picked)
    return merged


def _rows(value: Any, rows: Tensor) -> Any:
    if value is None or (isinstance(value, Tensor) and value.dim() == 0):
        return value
    return value[rows] if isinstance(value, Tensor) else [value[row] for row in rows.tolist()]


def keep_rollouts(batch: Batch, kept: Tensor, pad_token: int, accelerator: Accelerator) -> Batch:
    """The kept rows of all ranks, the same number on each: what a rank has too many of goes where some are missing.

    Args:
        batch: this rank's rows.
        kept: bool, a rollout of all ranks each; the same on every rank, and a multiple of their number.
    """
    here, ranks = accelerator.process_index, accelerator.num_processes
    of_rank = kept.view(ranks, -1)
    counts = of_rank.sum(dim=1).tolist()
    quota = sum(counts) // ranks
    own = of_rank[here].nonzero()[:, 0]
    staying = take(batch, own[:quota])
    if all(count == quota for count in counts):
        return staying
    moving = take(batch, own[quota:])
    rows = [
        {name: value[row].cpu() for name, value in moving.items() if _by_row(value)} for row in range(len(own[quota:]))
    ]
    moved = gather_object(rows)  # by every rank, in the order of the ranks
    before = sum(max(0, quota - count) for count in counts[:here])
    return _joined(staying, moved[before : before + max(0, quota - counts[here])], pad_token)


def _by_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _joined(batch: Batch, rows: list[Batch], pad_token: int) -> Batch:
    """``batch`` with further rows, which may be wider or narrower; what is new in width is padding."""

    def widened(name: str, value: Tensor, width: int) -> Tensor:
        missing = width - value.shape[-1]
        filler = {"prompt_ids": pad_token, "completion_ids": pad_token, "importance_sampling_ratio": 1}.get(name, 0)
        return pad(value, (missing, 0) if name in _PROMPT else (0, missing), value=filler)

    def joined(name: str, value: Tensor) -> Tensor:
        new = [row[name].to(value.device) for row in rows]
        if value.dim() > 1:
            width = max(tensor.shape[-1] for tensor in [value, *new])
            value, new = widened(name, value, width), [widened(name, row, width) for row in new]
        return torch.cat([value, *(row[None] for row in new)])

    return {name: joined(name, value) if _by_row(value) else value for name, value in batch.items()}


def trimmed(batch: Batch, multiple: int | None) -> Batch:
    """Without the outer columns that are padding in every row: the longest prompt or completion may not be kept.

    Positions count from a row's first column, padding or not, so cutting on the left moves them all by the same number:
    rotary embeddings see differences only.
    """
    prompt = _width(batch["prompt_mask"].flip(1), multiple)
    completion = _width(batch["completion_mask"], multiple)
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
    """How many columns it takes to hold all that is marked; at least one."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return max(1, int((mask.any(dim=0) * places).amax()))
