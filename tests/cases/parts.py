"""A call's arguments, divided among ranks in the ways that trainers have them: every group or sequence whole on a rank,
one over all ranks, a piece of each on every rank, or cut anywhere by offsets that all ranks have.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .draw import Draw
from .row import Arguments

_OF_SEGMENTS = ("advantages", "draws")  # arguments that may have one number for each segment


class Parts(NamedTuple):
    """Where the values of each rank, and its segments, lie in those of one process that has everything."""

    values: tuple[Tensor, ...]
    """For each rank, the places of its values, in the shape that they have there."""
    segments: tuple[Tensor, ...]
    """For each rank, the places of the segments of which it has values."""
    options: tuple[dict[str, Any], ...]
    """For each rank, its ``offsets`` and the ``placement``."""

    def of_values(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.flatten()[self.values[rank].flatten()].view(self.values[rank].shape)

    def of_segments(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.flatten()[self.segments[rank].flatten()].view(self.segments[rank].shape)


def divided(draw: Draw, given: Arguments, of: str, size: int, pieces: bool) -> tuple[Arguments, list[Arguments], Parts]:
    """Returns the arguments of one process, those of each of ``size`` ranks, and how they were divided. The argument
    ``of`` has the values. ``pieces``: whether the function takes a piece of every segment on each rank.
    """
    values, offsets = given[of], given.get("offsets")
    parts = (_rows if offsets is None else _ragged)(draw, values, offsets, size, pieces)
    given = given | {name: _of_each(parts, values, offsets, given[name]) for name in _OF_SEGMENTS if name in given}
    whole: Arguments = dict(given)
    of_ranks = []
    for rank, options in enumerate(parts.options):
        own = {name: _own(parts, name, part, values, rank) for name, part in given.items()}
        of_ranks.append(own | options)
    return whole, of_ranks, parts


def _own(parts: Parts, name: str, part: Any, values: Tensor, rank: int) -> Any:
    if not isinstance(part, Tensor) or part.dim() == 0:
        return part
    if part.shape == values.shape and name != "draws":  # of which there is always one for each segment
        return parts.of_values(part, rank)
    if name not in _OF_SEGMENTS:
        return part
    own = parts.of_segments(part, rank)
    return own.flatten() if part.dim() == 1 else own


def _of_each(parts: Parts, values: Tensor, offsets: Tensor | None, part: Any) -> Any:
    """One number for each value in place of one for each segment, where a rank with as many values as segments would
    take it for that.
    """
    if offsets is None or not isinstance(part, Tensor) or part.shape == values.shape or part.dim() == 0:
        return part
    mistaken = any(len(own) == len(each) for own, each in zip(parts.values, parts.segments, strict=True))
    return part.repeat_interleave(offsets.diff()) if mistaken and values.is_floating_point() else part


def _rows(draw: Draw, values: Tensor, _: None, size: int, pieces: bool) -> Parts:
    at, segments = (torch.arange(shape.numel()).view(shape) for shape in (values.shape, values.shape[:-1]))
    if values.dim() == 1:
        own = at.split(draw.parts(len(at), size))
        return Parts(own, (segments,) * size, ({},) * size)
    if pieces and draw.flag():
        own = at.split(draw.parts(at.shape[-1], size), -1)
        return Parts(own, (segments,) * size, ({"placement": "pieces"},) * size)
    lengths = draw.parts(len(at), size)
    return Parts(at.split(lengths), segments.split(lengths), ({},) * size)


def _ragged(draw: Draw, values: Tensor, offsets: Tensor, size: int, pieces: bool) -> Parts:
    at, segments, lengths = torch.arange(len(values)), torch.arange(len(offsets) - 1), offsets.diff().long()
    form = draw.choice(("segments", "global", "pieces") if pieces else ("segments", "global"))
    if form == "global":
        own = at.split(draw.parts(len(at), size))
        return Parts(own, (segments,) * size, ({"offsets": offsets, "placement": form},) * size)
    if form == "segments":
        counts = draw.parts(len(segments), size)
        own_lengths = lengths.split(counts)
        own = at.split([int(part.sum()) for part in own_lengths])
        return Parts(own, segments.split(counts), tuple({"offsets": _edges(part, offsets)} for part in own_lengths))
    cuts = torch.tensor([draw.parts(length, size) for length in lengths.tolist()], dtype=torch.int64).view(-1, size)
    begins = offsets[:-1].long().unsqueeze(1) + torch.nn.functional.pad(cuts.cumsum(1)[:, :-1], (1, 0))
    own = tuple(
        torch.cat([torch.arange(0), *(torch.arange(a, a + n) for a, n in zip(of.tolist(), some.tolist(), strict=True))])
        for of, some in zip(begins.T, cuts.T, strict=True)
    )
    options = tuple({"offsets": _edges(some, offsets), "placement": form} for some in cuts.T)
    return Parts(own, (segments,) * size, options)


def _edges(lengths: Tensor, like: Tensor) -> Tensor:
    return torch.tensor([0, *accumulate(lengths.tolist())], dtype=like.dtype)
