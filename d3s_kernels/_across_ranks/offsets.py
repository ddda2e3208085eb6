"""Segments that are cut across ranks: the piece of each segment that a rank has."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import is_known
from .._groups import Ranks

PLACEMENTS = ("whole", "global", "pieces")


def require_placement(
    placement: str, values: Tensor, offsets: Tensor | None, name: str, takes: tuple[str, ...] = PLACEMENTS
) -> None:
    """Checks what one rank can check without the others."""
    if placement not in takes:
        raise ValueError(f"placement: got {placement!r}; takes {', '.join(map(repr, takes[:-1]))} or {takes[-1]!r}")
    if placement != "global":
        return
    if offsets is None:
        raise ValueError("offsets: got None with placement='global'; takes the offsets of all ranks' values")
    if values.dim() != 1:
        raise ValueError(f"{name}: got shape {list(values.shape)} with offsets; takes a 1-D tensor with offsets")
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"offsets: got shape {list(offsets.shape)} of {offsets.dtype}; takes a 1-D int64 or int32 tensor of "
            "segments + 1"
        )


def own_offsets(placement: str, offsets: Tensor | None) -> Tensor | None:
    """The offsets if they can be checked against this rank's values alone, else None."""
    return None if placement == "global" else offsets


def is_whole(placement: str, values: Tensor, offsets: Tensor | None) -> bool:
    """Whether each segment lies on one rank. A 1-D tensor without offsets is one segment with a piece on every rank."""
    return placement == "whole" and (values.dim() > 1 or offsets is not None)


def alike(placement: str, values: Tensor, offsets: Tensor | None) -> dict[str, object]:
    """The values that have to be the same on all ranks."""
    shape: object = None
    if placement == "global":
        shape = offsets
    elif not is_whole(placement, values, offsets):
        shape = list(values.shape[:-1]) if offsets is None else offsets.shape[0] - 1
    return {"placement": placement, "offsets": shape}


def own_pieces(offsets: Tensor, lengths: Tensor, ranks: Ranks, name: str) -> Tensor:
    """Offsets of this rank's piece, maybe empty, of every global segment.

    Raises:
        ValueError: on all ranks alike, if the host may read the offsets.
    """
    if is_known(offsets):
        require_offsets(offsets, int(lengths.sum()), name)
    return (offsets - lengths[: ranks.rank].sum()).clamp(min=0).minimum(lengths[ranks.rank])


def require_offsets(offsets: Tensor, total: int, name: str) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"offsets: starts at {first}; must start at 0")
    if (falls := (offsets.diff() < 0).nonzero()).numel():
        at = int(falls[0]) + 1
        raise ValueError(
            f"offsets: decreases from {int(offsets[at - 1])} to {int(offsets[at])} at {at}; must not decrease"
        )
    if last != total:
        raise ValueError(f"offsets: ends at {last}; must end at the length of {name} on all ranks, {total}")
