"""random_prefixes across ranks: the cuts are those that one process would draw for all ranks' sequences."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._collectives import ranks_of
from .._rules.prefixes import cut_at, drawn, prefix_arguments
from .._segments.segments import segments_of
from .agreement import Layout, agree
from .tokens import pieces_of


def random_prefixes(
    mask: Tensor,
    ratio: float | Tensor,
    draws: Tensor | None,
    generator: torch.Generator | None,
    process_group: dist.ProcessGroup | DeviceMesh,
    placement: str,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the fields of :class:`d3s_kernels.Prefixes`."""
    ranks, layout = ranks_of(process_group), Layout(process_group, placement, offsets)

    def check() -> tuple[Tensor, Tensor]:
        present, share = prefix_arguments(mask, ratio, draws, generator, layout.local_offsets(ranks))
        layout.check("mask", present, "whole", "global", "pieces")
        return present, share

    present, share = agree(ranks, "random_prefixes", check, lambda checked: {"ratio": ratio, "placement": placement})
    whole = layout.is_whole(present)
    pieces = offsets
    if placement == "global":
        pieces = pieces_of(layout, ranks.gather_number(present.numel(), present), ranks, "mask")
    segments = segments_of(present, pieces)
    if whole and draws is None and generator is not None:
        counts = ranks.gather_number(segments.number, present).tolist()
        begin = sum(counts[: ranks.rank])
        numbers = drawn(sum(counts), None, generator, present)[begin : begin + segments.number]
    else:
        numbers = drawn(segments.number, draws, generator, present)

    def of_all_ranks(here: Tensor) -> tuple[Tensor, Tensor]:
        if whole:
            return here, torch.zeros_like(here)
        everyones = ranks.gather(here)
        return everyones.sum(dim=0), everyones[: ranks.rank].sum(dim=0)

    if not whole:  # the ranks have pieces of the same sequences
        numbers = ranks.gather(numbers)[0]
    kept, weight, count = cut_at(present, share, segments, numbers, of_all_ranks)
    return kept, weight, ranks.add_(count)
