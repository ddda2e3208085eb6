"""Where sequences are cut at random, and the weights of the tokens before the cuts, for one process and for several
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._arguments.checks import as_bool, is_number, require_optional_tensors, require_readable, require_tensors
from .._segments.quota import DOUBLE_SLACK, FLOAT_SLACK
from .._segments.segments import Segments
from .arguments import require_generator
from .rules import usable


def prefix_arguments(
    mask: Tensor, ratio: float | Tensor, draws: Tensor | None, generator: torch.Generator | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Checks the arguments. Returns the mask as bool, and the ratio as a 0-d float64 tensor, slightly reduced so that
    rounding errors do not raise a minimum length. A ratio outside [0.5, 1] in a tensor becomes NaN.
    """
    require_tensors(mask=mask)
    others: dict[str, Tensor | None] = {"draws": draws, "offsets": offsets}
    require_optional_tensors(mask, **others)
    require_readable(mask=mask, **others)
    present = as_bool("mask", mask)
    if present.dim() == 0 or (offsets is not None and present.dim() > 1):
        takes = "[..., T]" if offsets is None else "a 1-D tensor with offsets"
        raise ValueError(f"mask: got shape {list(present.shape)}; takes {takes}")
    present = usable(torch.zeros_like(present, dtype=torch.float32), present, offsets)  # also checks shapes and offsets
    if draws is not None and generator is not None:
        raise ValueError("draws: got a tensor and a generator; takes one of the two")
    require_generator(generator, "prefix", True, present)
    if isinstance(ratio, Tensor):
        require_optional_tensors(mask, ratio=ratio)
        if ratio.dim() or not ratio.is_floating_point():
            raise ValueError(f"ratio: got shape {list(ratio.shape)} of {ratio.dtype}; takes a number or a 0-d tensor")
        slack = DOUBLE_SLACK if ratio.dtype == torch.float64 else FLOAT_SLACK
        share = ratio.double()
        share = torch.where((share >= 0.5) & (share <= 1), share - slack, torch.nan)
    else:
        if not is_number(ratio):
            raise TypeError(f"ratio: got {type(ratio).__name__}; takes a number or a 0-d tensor")
        if not 0.5 <= ratio <= 1:
            raise ValueError(f"ratio: got {ratio}; takes a number in [0.5, 1] for prefixes")
        share = torch.full((), ratio - DOUBLE_SLACK, dtype=torch.float64, device=mask.device)
    return present, share


def drawn(number: int, draws: Tensor | None, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Returns float64 ``[number]``: the random number of each sequence."""
    if draws is not None:
        if draws.numel() != number or not draws.is_floating_point():
            raise ValueError(
                f"draws: got shape {list(draws.shape)} of {draws.dtype}; takes a float for each of {number} sequences"
            )
        return draws.double().flatten()
    options: dict[str, Any] = {"dtype": torch.float64, "device": like.device}
    if generator is not None:  # torch.compile accepts no generator, not even None
        options["generator"] = generator
    return torch.rand(number, **options)


def cut_at(
    present: Tensor,
    share: Tensor,
    segments: Segments,
    draws: Tensor,
    of_all_ranks: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts each segment. Returns the fields of :class:`d3s_kernels.Prefixes`. ``of_all_ranks`` gets the number of this
    rank's tokens in each segment. It returns two numbers for each segment: how many tokens all ranks have, and how many
    tokens the ranks before this rank have.
    """
    flat = present.flatten()
    here = segments.without_ends(segments.total(flat))
    total, before = of_all_ranks(here)
    ratio, total = share, total.double()
    least = ((2 * ratio - 1) * total).ceil().clamp(min=1)
    cut = (least + (draws * (total - least + 1)).floor()).minimum(total)  # a product may be rounded up to total + 1
    place = segments.count_before(flat) + segments.spread(before) + 1  # counts the tokens of a sequence from 1
    least, cut, total = (segments.spread(each) for each in (least, cut, total))
    kept = flat & (place <= cut)  # false if the ratio is NaN
    weight = torch.where(kept, (total - least + 1) / (total - torch.maximum(place.double(), least) + 1), 0.0)
    return kept.view(present.shape), weight.float().view(present.shape), kept.sum()
