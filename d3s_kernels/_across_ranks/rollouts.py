"""group_advantages, max_variance_select, select_rollouts across ranks.

The result is this rank's piece of what the local op gives for the concatenation of all ranks' tensors. It is computed
in just this way: all ranks' values are gathered once, and each rank runs the local op on all of them. If groups are
whole on their ranks and nothing is pooled, the local op gives the same result on the rank's own values, and nothing is
sent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import is_known, require_optional_tensors, require_readable, whole_number
from .._dispatch import ops
from .._groups import ranks_of
from .._segments.segments import both
from .._selection.rollouts import DTYPES_OF_REWARDS, AdvantageArguments, RolloutArguments, check_advantages
from .._selection.rules import random_scores
from .agreement import agree, require_alike
from .equal_rows import most_varied
from .gathered import Concatenation, concatenate, gather
from .offsets import is_whole, own_offsets, require_offsets, require_placement


class Across(NamedTuple):
    """The arguments that concern the ranks."""

    process_group: dist.ProcessGroup | DeviceMesh
    placement: str
    max_rollouts: int | None

    def check(self, name: str, values: Tensor, offsets: Tensor | None) -> None:
        require_placement(self.placement, values, offsets, name, ("whole", "global"))
        if self.placement == "global" and offsets is not None:
            require_optional_tensors(values, offsets=offsets)
            if is_known(offsets):  # all but the end, which depends on other ranks
                require_offsets(offsets, int(offsets[-1]), name)
        if self.max_rollouts is None:
            return
        most = whole_number("max_rollouts", self.max_rollouts, at_least=1)
        if values.numel() > most:
            raise ValueError(
                f"max_rollouts: got {most} with {values.numel()} values; takes no less than any rank has of them"
            )

    def alike(self, values: Tensor, offsets: Tensor | None) -> dict[str, Any]:
        """The values that have to be the same on all ranks."""
        given = f"{values.dtype} {['*', *values.shape[1:]]}"
        of_all = offsets if self.placement == "global" else offsets is not None
        return {"values": given, "offsets": of_all, "placement": self.placement, "max_rollouts": self.max_rollouts}


# ---- advantages -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def group_advantages(arguments: AdvantageArguments, across: Across) -> Tensor:
    ranks = ranks_of(across.process_group)
    _, offsets, scale, eps, ddof = arguments

    def check() -> Tensor:
        require_readable(**arguments._asdict())
        rewards = check_advantages(*arguments)
        across.check("rewards", rewards, offsets)
        ops.check("group_advantages", rewards, own_offsets(across.placement, offsets), scale, eps, ddof)
        return rewards

    same = {"scale": scale, "eps": eps, "ddof": ddof}
    rewards = agree(ranks, "group_advantages", check, lambda rewards: across.alike(rewards, offsets) | same)
    whole = is_whole(across.placement, rewards, offsets)
    if ranks.size == 1 or (whole and scale != "batch"):
        return ops.group_advantages(rewards, offsets, scale, eps, ddof)
    # All send float64: ranks with different dtypes then find out, where they would wait for each other's bytes.
    dtype = DTYPES_OF_REWARDS.index(rewards.dtype)
    everyones = gather(ranks, rewards.reshape(-1).double(), dtype, across.max_rollouts)
    if everyones.total is not None:
        require_alike([{"rewards": DTYPES_OF_REWARDS[number]} for number in everyones.numbers.tolist()])
    together = concatenate(everyones, ranks.rank, rewards.numel())
    groups = _own_groups(rewards, offsets, together) if whole else _groups_of_all("rewards", offsets, together)
    all_rewards = together.values.to(rewards.dtype)  # exact; what counts as rounding depends on the dtype
    advantages: Tensor = ops.group_advantages(all_rewards, groups, scale, eps, ddof)[together.own]
    if everyones.total is None:  # the host does not know whether it is one dtype
        advantages = advantages.masked_fill((everyones.numbers != dtype).any(), math.nan)
    if offsets is not None:
        own = torch.arange(rewards.numel(), device=rewards.device) if whole else together.own
        advantages = advantages.masked_fill(_left_out(own, offsets), math.nan)
    return advantages.view(rewards.shape)


def _own_groups(rewards: Tensor, offsets: Tensor | None, together: Concatenation) -> Tensor:
    """Offsets of this rank's groups, with one segment before them and one behind them for the other ranks' values."""
    if offsets is None:
        edges = torch.arange(math.prod(rewards.shape[:-1]) + 1, device=rewards.device) * rewards.shape[-1]
    else:
        edges = offsets.long().clamp(0, rewards.numel())
    return together.with_tail(torch.cat([edges.new_zeros(1), together.begin + edges]))


# ---- selections -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def select(arguments: RolloutArguments, across: Across) -> Tensor:
    """The selection of ``max_variance_select`` or ``select_rollouts`` across ranks."""
    ranks, values, offsets = ranks_of(across.process_group), arguments.values, arguments.offsets

    def check() -> RolloutArguments:
        checked, number = arguments.checked()
        across.check("values", values, offsets)
        own = own_offsets(across.placement, offsets)
        ops.check("max_variance_select", values, *number, checked.mask, own, checked.max_segment)
        return checked

    same = {name: getattr(arguments, name) for name in ("keep", "rule", "scope", "equal_rows")}
    checked = agree(ranks, arguments.op, check, lambda _: across.alike(values, offsets) | same)
    whole, pooled = is_whole(across.placement, values, offsets), arguments.scope == "batch"
    if ranks.size == 1 or (whole and not pooled):
        return checked.select()

    numbers, rule, keep = values.reshape(-1).float(), arguments.rule, arguments.keep
    usable = both(numbers.isfinite(), checked.mask)
    if rule == "random":  # scores are sent in place of values, so that all ranks have the same
        numbers, rule = random_scores(numbers, arguments.generator, ranks.rank), "highest"
    everyones = gather(ranks, numbers.masked_fill(~usable, math.nan), _groups(values, offsets), across.max_rollouts)
    together = concatenate(everyones, ranks.rank, len(numbers))
    groups = together.as_one_segment() if whole else _groups_of_all("values", offsets, together)
    if pooled:
        keep = _of_all(keep, everyones.numbers.sum() if whole else len(groups) - 2, len(together.values), values)
        groups = together.as_one_segment()
    if arguments.equal_rows:
        assert isinstance(keep, Tensor)
        return most_varied(everyones.values, keep)[ranks.rank, : len(numbers)].view(values.shape)
    longest = arguments.max_segment if everyones.total is not None else None  # the padding may be longer
    of_all = RolloutArguments(arguments.op, together.values, keep, rule, groups, "group", None, longest)
    kept = of_all.select()[together.own]
    if offsets is not None and not pooled:
        kept = kept & ~_left_out(together.own, offsets)
    return kept.view(values.shape)


def _groups(values: Tensor, offsets: Tensor | None) -> int:
    return math.prod(values.shape[:-1]) if offsets is None else len(offsets) - 1


def _of_all(keep: int | Tensor, groups: int | Tensor, values: int, like: Tensor) -> Tensor:
    """``keep`` times the number of groups, on the device. ``keep`` is limited to the number of values, so that the
    product does not overflow. The number of groups counts as at least 1; without a group there are no values."""
    most = max(values, 1)
    if isinstance(keep, Tensor):
        each = keep.reshape(()).long().clamp(max=most)
    else:
        each = torch.full((), min(keep, most), dtype=torch.int64, device=like.device)
    return each * (groups.clamp(min=1) if isinstance(groups, Tensor) else max(groups, 1))


# ---- offsets of all ranks -------------------------------------------------------------------------------------------


def _groups_of_all(name: str, offsets: Tensor | None, together: Concatenation) -> Tensor:
    """Offsets of the segments of all ranks' values, with one more segment for the padding."""
    if offsets is None:
        return together.as_one_segment()
    if is_known(offsets):
        require_offsets(offsets, int(together.total), name)
    return together.with_tail(offsets)


def _left_out(place: Tensor, offsets: Tensor) -> Tensor:
    """Which places unchecked offsets leave out."""
    return (place < offsets[0]) | (place >= offsets[-1])
