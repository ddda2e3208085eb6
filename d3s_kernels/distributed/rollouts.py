"""group_advantages, variance_mass, max_variance_select and select_rollouts across ranks.

The tensors of all ranks count as one concatenated tensor. Each rank gathers the values of all ranks once, runs the
local op on all values, and returns its own part of the result. If every group is whole on one rank and nothing is
pooled, each rank runs the local op only on its own values, and nothing is sent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments.bundles import SegmentArguments
from .._arguments.checks import require_readable, require_tensors
from .._collectives import Ranks, ranks_of
from .._dispatch import ops
from .._rules.arguments import (
    DTYPES_OF_REWARDS,
    group_advantages_arguments,
    max_variance_arguments,
    select_rollouts_arguments,
)
from .._rules.equal_rows import most_varied
from .._rules.rules import at_most, marked_by_rule, random_scores
from .._rules.variance import by_variance, checked_rewards, require_share, variances
from .._segments.segments import both
from .agreement import Layout as Layout
from .agreement import agree, require_alike


@torch.no_grad()
def group_advantages(rewards: Tensor, scale: str, eps: float, ddof: int, layout: Layout) -> Tensor:
    ranks, offsets = ranks_of(layout.process_group), layout.offsets

    def check() -> tuple[Any, ...]:
        require_readable(rewards=rewards, offsets=offsets)
        arguments = group_advantages_arguments(rewards, layout.local_offsets(ranks), scale, eps, ddof)
        layout.check("rewards", arguments[0], "whole", "global")
        ops.check("group_advantages", *arguments)
        return arguments

    same = {"scale": scale, "eps": eps, "ddof": ddof}
    arguments = agree(ranks, "group_advantages", check, lambda checked: _alike(layout, checked[0]) | same)
    rewards = arguments[0]  # converted to a float dtype
    whole = layout.is_whole(rewards)
    if ranks.size == 1 or (whole and scale != "batch"):
        return ops.group_advantages(*arguments)
    everyones = _gather_rewards(ranks, rewards, layout)
    if not whole:
        groups = everyones.segments(layout, "rewards")
    else:  # this rank's groups, and a segment before and a segment after them for other ranks' values
        if offsets is None:
            edges = torch.arange(math.prod(rewards.shape[:-1]) + 1, device=rewards.device) * rewards.shape[-1]
        else:
            edges = offsets.long().clamp(0, rewards.numel())
        groups = everyones.with_tail(torch.cat([edges.new_zeros(1), everyones.begin + edges]))
    all_rewards = everyones.values.to(rewards.dtype)  # without rounding; the op's tolerance depends on the dtype
    advantages = ops.group_advantages(all_rewards, groups, scale, eps, ddof)[everyones.places]
    if everyones.host_total is None:  # the host does not know whether all ranks have the same dtype
        advantages = advantages.masked_fill(_dtypes_differ(everyones), math.nan)
    if offsets is not None:
        places = torch.arange(rewards.numel(), device=rewards.device) if whole else everyones.places
        advantages = advantages.masked_fill(_left_out(places, offsets), math.nan)
    return advantages.view(rewards.shape)


def _gather_rewards(ranks: Ranks, rewards: Tensor, layout: Layout) -> Everyones:
    # All ranks send float64, so that messages have equal sizes. Otherwise ranks with different dtypes would wait for
    # each other's bytes, instead of raising.
    dtype = DTYPES_OF_REWARDS.index(rewards.dtype)
    everyones = gather(ranks, rewards.reshape(-1).double(), dtype, layout.max_rollouts)
    if everyones.host_total is not None:
        require_alike([{"rewards": DTYPES_OF_REWARDS[number]} for number in everyones.numbers.tolist()])
    return everyones


def _dtypes_differ(everyones: Everyones) -> Tensor:
    return (everyones.numbers != everyones.numbers[0]).any()


@torch.no_grad()
def variance_mass(rewards: Tensor, share: float, layout: Layout, at_least: int = 0) -> Tensor:
    """Also marks the first groups, by variance, until ``at_least`` groups of all ranks are marked."""
    ranks, offsets = ranks_of(layout.process_group), layout.offsets

    def check() -> Tensor:
        checked = checked_rewards(rewards, layout.local_offsets(ranks))
        layout.check("rewards", checked, "whole", "global")
        require_share(share)
        groups = SegmentArguments(offsets).number_in(checked)
        if layout.is_whole(checked) and layout.max_rollouts is not None and groups > layout.max_rollouts:
            raise ValueError(f"max_rollouts: got {layout.max_rollouts} with {groups} groups; takes at least as many")
        return checked

    rewards = agree(ranks, "variance_mass", check, lambda checked: _alike(layout, checked) | {"share": share})
    if ranks.size == 1 or layout.is_whole(rewards):
        everyones = gather(ranks, variances(rewards, offsets), 0, layout.max_rollouts)
        marked = by_variance(everyones.values.nan_to_num(0.0), share).marked(at_least)[everyones.places]
    else:
        everyones = _gather_rewards(ranks, rewards, layout)
        of_all = variances(everyones.values.to(rewards.dtype), everyones.segments(layout, "rewards"))
        marked = by_variance(of_all[:-1], share).marked(at_least)  # the last segment is the padding
        if everyones.host_total is None:
            marked = marked & ~_dtypes_differ(everyones)
    return marked if offsets is not None else marked.view(rewards.shape[:-1])


@torch.no_grad()
def select_rollouts(
    values: Tensor,
    keep: int | Tensor,
    rule: str,
    scope: str,
    mask: Tensor | None,
    generator: torch.Generator | None,
    equal_rows: bool,
    layout: Layout,
    *,
    call: str = "select_rollouts",
) -> Tensor:
    """Computes either select_rollouts or max_variance_select: ``call`` is the name of the function. Only
    max_variance_select uses the layout's ``max_segment``.
    """
    ranks, offsets = ranks_of(layout.process_group), layout.offsets

    def check() -> tuple[Any, ...]:
        name = "values" if call == "max_variance_select" else "advantages"
        require_tensors(**{name: values})
        require_readable(**{name: values}, keep=keep, offsets=offsets, mask=mask)
        if call == "max_variance_select":
            arguments = max_variance_arguments(values, keep, mask, layout.local_segments(ranks))
        else:
            here = layout.local_offsets(ranks)
            arguments = select_rollouts_arguments(values, keep, rule, scope, mask, here, generator, equal_rows)
        layout.check("values", values, "whole", "global")
        ops.check("max_variance_select", *arguments)
        return arguments

    same = {"keep": keep, "rule": rule, "scope": scope, "equal_rows": equal_rows}
    arguments = agree(ranks, call, check, lambda _: _alike(layout, values) | same)
    whole, pooled = layout.is_whole(values), scope == "batch"
    if ranks.size == 1 or (whole and not pooled):
        return marked_by_rule(rule, generator, *arguments)
    number, tensor, checked_mask = arguments[1:4]

    numbers = values.reshape(-1).float()
    usable = both(numbers.isfinite(), checked_mask)
    if rule == "random":  # scores are sent instead of values, so that all ranks have the same scores
        numbers, rule = random_scores(numbers, generator, ranks.rank), "highest"
    groups_here = SegmentArguments(offsets).number_in(values)
    everyones = gather(ranks, numbers.masked_fill(~usable, math.nan), groups_here, layout.max_rollouts)
    segments = everyones.segments(layout, "values")
    if pooled:  # keeps `each * groups` values in all; if there are no groups, `groups` is 1
        groups = everyones.numbers.sum().clamp(min=1) if whole else max(len(segments) - 2, 1)
        each = at_most(max(len(everyones.values), 1), number, tensor)
        number, tensor = None, torch.ones((), dtype=torch.int64, device=values.device) * each * groups
        segments = everyones.as_one_segment()
    if equal_rows:  # only with scope "batch"
        return most_varied(everyones.rows, tensor)[ranks.rank, : len(numbers)].view(values.shape)
    # If the host does not know the total, the padding is one more segment, which may be longer than max_segment.
    longest = layout.max_segment if everyones.host_total is not None else None
    kept = marked_by_rule(rule, None, everyones.values, number, tensor, None, segments, longest, False)
    kept = kept[everyones.places]
    if offsets is not None and not pooled:
        kept = kept & ~_left_out(everyones.places, offsets)
    return kept.view(values.shape)


def _alike(layout: Layout, values: Tensor) -> dict[str, Any]:
    """Returns the arguments and properties that must be the same on all ranks."""
    return {
        "values": f"{values.dtype} {['*', *values.shape[1:]]}",
        "offsets": layout.offsets if layout.placement == "global" else layout.offsets is not None,
        "placement": layout.placement,
        "max_rollouts": layout.max_rollouts,
    }


def _left_out(places: Tensor, offsets: Tensor) -> Tensor:
    """Marks the positions that the offsets leave out. Only unchecked offsets can leave out positions."""
    return (places < offsets[0]) | (places >= offsets[-1])


# ---- all ranks' rollouts in one tensor -------------------------------------------------------------------------------

_HEADER = 2  # the number of int32 elements before the values: the count of values, and an additional integer


class Everyones(NamedTuple):
    """The values of all ranks, both as one row for each rank and concatenated."""

    rows: Tensor  # [ranks, most]: NaN after a rank's last value
    numbers: Tensor  # int64 [ranks]: the additional integer from each rank
    lengths: Tensor  # int64 [ranks]: how many values each rank has
    host_total: int | None  # how many values all ranks have together; None if the host does not know
    values: Tensor  # all values in rank order, then padding of NaN
    begin: Tensor  # int64 [1]: where the values of this rank begin in `values`
    places: Tensor  # int64 [values of this rank]: the position of each of these values in `values`

    def segments(self, layout: Layout, name: str) -> Tensor:
        """Returns the offsets of the segments over all ranks, with one more segment for the padding. If the layout has
        no global offsets, all values are one segment.
        """
        if layout.placement != "global":
            return self.as_one_segment()
        assert layout.offsets is not None
        layout.check_end(name, self.lengths)
        return self.with_tail(layout.offsets)

    def as_one_segment(self) -> Tensor:
        return self.with_tail(pad(self.lengths.sum(0, keepdim=True), (1, 0)))

    def with_tail(self, offsets: Tensor) -> Tensor:
        """Returns the offsets with one more segment at the end, for the padding."""
        return torch.cat([offsets, offsets.new_full((1,), len(self.values))])


def gather(ranks: Ranks, values: Tensor, number: int, max_rollouts: int | None) -> Everyones:
    """Gathers the values of all ranks, float32 or float64 ``[n]``, and an additional integer from each rank.

    Ranks may have different numbers of values, or none, but all messages have the same length. With the caller's bound
    ``max_rollouts``, a message has room for that many values, and only the device knows where the values of a rank end.
    Without a bound, the length is the largest number of values of any rank. Finding it takes one more collective and a
    host sync.
    """
    most, total = max_rollouts, None
    if most is None:
        known = ranks.gather_number(len(values), values).tolist()  # causes a host sync
        most, total = max(known), sum(known)
    # The message is int32, so that nothing treats the two integers of the header as floats.
    padded = pad(values, (0, most - len(values)), value=math.nan).view(torch.int32)
    message = padded.new_empty(_HEADER + len(padded))
    message[0], message[1], message[_HEADER:] = len(values), number, padded
    all_messages = ranks.gather(message)
    lengths, numbers = all_messages[:, 0].long(), all_messages[:, 1].long()
    rows = all_messages[:, _HEADER:].contiguous().view(values.dtype)
    if total is None and _is_at_hand(lengths):
        total = int(lengths.sum())
    ends = lengths.cumsum(0)
    begins = ends - lengths
    begin = begins[ranks.rank : ranks.rank + 1]
    places = begin + torch.arange(len(values), device=ends.device)
    in_order = rows.view(-1)
    if total != rows.numel():  # some rows have padding
        place = torch.arange(rows.numel() if total is None else total, device=ends.device)
        holder = torch.searchsorted(ends, place, right=True)  # each value's rank; for padding, one past the last
        inside = place < ends[-1]
        holder = holder.where(inside, 0)
        source = (holder * most + place - begins[holder]).where(inside, 0)
        in_order = in_order[source].masked_fill(~inside, math.nan)
    return Everyones(rows, numbers, lengths, total, in_order, begin, places)


def _is_at_hand(lengths: Tensor) -> bool:
    """Returns whether the host can read the lengths without a host sync."""
    return lengths.is_cpu and not torch.compiler.is_compiling()
