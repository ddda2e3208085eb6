"""Chooses the rollouts of TRL's generation batch to train on, and the rank that trains on each.

TRL's generation batch is a dictionary: token tensors with a row for each rollout, images, and numbers. Each rank holds
consecutive rows of the whole batch, and each group is consecutive rows too; a group may lie on two ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..._across_ranks.equal_rows import most_varied
from ...rollouts import RolloutRule, select_rollouts
from ...tokens import topk_mask
from .sets import NO_TOKEN, SETS
from .surface import UnknownTRL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Batch = dict[str, Any]

_PROMPT = {"prompt_ids", "prompt_mask"}  # padded on the left
_COMPLETION = {  # padded on the right
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "d3s_entropy", SETS,
}  # fmt: skip
_BOTH = {"token_type_ids", "mm_token_type_ids"}
IMAGES = (  # what the method that scores tokens takes in addition to them
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
_FIELDS = {"advantages", "num_items_in_batch", *_PROMPT, *_COMPLETION, *_BOTH, *IMAGES}


def check_fields(batch: Batch) -> None:
    """Refuses a batch with a field that is not known: on which side it is padded, and so how rows move, is not either.

    Raises:
        UnknownTRL: there is such a field.
    """
    unknown = sorted(batch.keys() - _FIELDS)
    if unknown:
        raise UnknownTRL(
            f"_generate_and_score_completions: its batch has {', '.join(unknown)}, which is not known; rows of it "
            "cannot be chosen, since nothing says on which side it is padded"
        )


def rows_to_keep(groups: int, n: int, keep: int, multiple: int) -> tuple[int, int]:
    """The number of rollouts a budget asks for, with ``keep`` clamped to [2, n]; and it rounded up to ``multiple``."""
    asked = min(max(keep, 2), n) * groups
    return asked, min(groups * n, -(-asked // multiple) * multiple)


def total_rewards(of_each_function: Tensor, weights: Tensor) -> Tensor:
    """``[rollouts, functions]``, NaN where a function gave no reward, to the weighted sum; NaN where none gave one."""
    total = (of_each_function * weights.to(of_each_function.device)).nansum(dim=1)
    return total.masked_fill(of_each_function.isnan().all(dim=1), torch.nan)


def ranked_by(advantages: Tensor, has_tokens: Tensor, rule: str) -> Tensor:
    """What rollouts are ranked by: their advantages. A rollout without a token in the loss (truncated, with
    mask_truncated_completions) teaches nothing: it counts as one whose advantage is 0, or for "highest" as the lowest.
    """
    if rule == "highest":
        return torch.where(has_tokens, advantages, advantages.amin() - 1)
    return torch.where(has_tokens, advantages, 0.0)


def choose_rollouts(
    advantages: Tensor,
    keep: int,
    scope: str,
    multiple: int,
    *,
    rule: RolloutRule = "max_variance",
    ranks: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Marks ``keep`` rollouts for each group, and more until their number is a multiple of ``multiple``.

    Args:
        advantages: ``[groups, n]``.
        keep: clamped to [2, n].
        scope: "batch" pools all groups. "group" keeps the same number of each group; if ``multiple`` requires more, the
            groups with the largest variance keep one more.
        multiple: divides ``groups * n``.
        rule: a rule of :func:`d3s_kernels.select_rollouts`.
        ranks: if given, each rank keeps the same number of rollouts, so that no rollout has to move between ranks.
            With scope "group", if no group lies on two ranks, each rank chooses from its own groups. Otherwise, for
            the rule "max_variance", the choice is the one with the largest variance over all ranks that was found
            under this restriction; for other rules each rank chooses from its own rollouts.
        generator: for the rule "random": in the same state on every rank.

    Returns:
        bool ``[groups * n]``.
    """
    groups, n = advantages.shape
    _, total = rows_to_keep(groups, n, keep, multiple)

    def chosen(values: Tensor, number: int) -> Tensor:
        return select_rollouts(values, number, rule=rule, scope="group", generator=generator)

    if ranks is not None and scope == "group" and groups % ranks == 0:
        of_each = [
            choose_rollouts(own, keep, scope, multiple // ranks, rule=rule, generator=generator)
            for own in advantages.chunk(ranks)
        ]
        return torch.cat(of_each)
    if ranks is not None:
        of_ranks = advantages.reshape(ranks, -1)
        if rule != "max_variance":
            return chosen(of_ranks, total // ranks).flatten()
        return most_varied(of_ranks, torch.full((), total, device=advantages.device)).flatten()
    if scope == "batch":
        return chosen(advantages.flatten(), total)
    each, more = divmod(total, groups)
    kept = chosen(advantages, each)
    if more:
        widest = topk_mask(advantages.var(dim=1), k=more)
        kept = torch.where(widest[:, None], chosen(advantages, each + 1), kept)
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
    rows = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
    return batch | exchange_rows(_widened(rows, pad_token, process_group), plan, process_group)


def _widened(rows: dict[str, Tensor], pad_token: int, process_group: ProcessGroup) -> dict[str, Tensor]:
    """Pads each tensor to its largest width over all ranks; the sets also in the number of their tokens."""
    from ..._groups import ranks_of

    names = sorted(name for name, value in rows.items() if value.dim() > 1)
    sizes = torch.tensor([size for name in names for size in rows[name].shape[1:]], device=rows["prompt_ids"].device)
    largest = iter(ranks_of(process_group).gather(sizes).amax(dim=0).tolist())
    fillers = {"prompt_ids": pad_token, "completion_ids": pad_token, "importance_sampling_ratio": 1, SETS: NO_TOKEN}

    def widened(name: str) -> Tensor:
        missing = [next(largest) - size for size in rows[name].shape[1:]]
        # torch pads the last dimension first, each in front and behind.
        around = [side for n in reversed(missing) for side in ((n, 0) if name in _PROMPT else (0, n))]
        return pad(rows[name], around, value=fillers.get(name, 0))

    return rows | {name: widened(name) for name in names}


def trimmed(batch: Batch, multiple: int | None) -> Batch:
    """Cuts the outer columns that are padding in every row: the longest prompt or completion may have been dropped.

    Positions count from a row's first column, including padding. So a cut on the left shifts all positions by the same
    number, which does not matter to rotary embeddings: they depend only on differences of positions.
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
    """The number of columns up to the last one with a mark; at least one."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return max(1, int((mask.any(dim=0) * places).amax()))
