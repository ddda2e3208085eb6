"""Cuts sequences at random places, so that only their prefixes are trained on, with weights that keep the gradient
unbiased (NAT, arXiv 2603.06619).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from .._rules.prefixes import cut_at, drawn, prefix_arguments
from .._segments.segments import segments_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Prefixes(NamedTuple):
    """The tokens before the cuts. All tensors stay on the device."""

    mask: Tensor
    """bool, the shape of the argument ``mask``. Nothing after a sequence's last token in the mask has to be forwarded.
    """
    weight: Tensor
    """float32, the same shape: the factor for each token's loss, 1 / P(the token is before the cut); 0 after the cut.
    """
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """int64, 0-d: the number of tokens before the cuts."""


@torch.no_grad()
def random_prefixes(
    mask: Tensor,
    ratio: float | Tensor = 0.5,
    *,
    offsets: Tensor | None = None,
    draws: Tensor | None = None,
    generator: torch.Generator | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Literal["whole", "global", "pieces"] = "whole",
) -> Prefixes:
    """Keeps a random prefix of each sequence. If you call it before the forward, the rest need not be computed.

    A sequence of T tokens is cut after its c-th token, where c is drawn from m, ..., T, all equally likely, and
    ``m = max(1, ceil((2 ratio - 1) T))``. So a sequence keeps the share ``ratio`` of its tokens on average, and half a
    token more if m is 1. The t-th token is before the cut with the probability ``(T - max(t, m) + 1) / (T - m + 1)``.
    Multiply each token's loss by its weight, the inverse of this probability, and divide the sum by a number that does
    not depend on the cuts, such as the number of all tokens. The mean of the gradient over all cuts is then the
    gradient of the loss over all tokens (Horvitz and Thompson). This holds only if a token's loss depends on the
    log-probability of this token alone. It does not hold for a ratio of a whole sequence.

    Args:
        mask: bool, or integer (0 means False): ``[..., T]``, each row is a sequence; or ``[N]`` with ``offsets``. A
            sequence has only the tokens where the mask is True.
        ratio: in [0.5, 1]: the expected share of the tokens before the cuts; a number, or a 0-d float64 or float32
            tensor, which is read on the device. If the value of a tensor is outside [0.5, 1], nothing is kept.
        draws: float ``[sequences]``, in [0, 1): a random number for each sequence, which determines its cut. Pass it if
            sequences may come in another order, or on another number of ranks.
        generator: without ``draws``, the generator to draw with, on the device of ``mask``, or None for torch's default
            generator. ``torch.compile(fullgraph=True)`` requires None.

    Ragged batches:
        offsets: int32 or int64 ``[S + 1]``, from 0 to N.

    Across ranks:
        process_group, placement: as in :func:`d3s_kernels.topk_mask`. If every rank's generator has the same state, the
            cuts are the same as if one process drew them for the sequences of all ranks, in rank order. If a sequence
            lies on several ranks, all ranks use the random numbers of the first rank, and its tokens must be in rank
            order. So call this function before context parallelism gives each rank two pieces of a sequence.

    Returns:
        :class:`Prefixes`. Its ``count`` is over all ranks.

    Raises:
        ValueError, TypeError: a ratio outside [0.5, 1]; both ``draws`` and ``generator``; a wrong shape, dtype, device
            or offsets.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> mask = torch.tensor([[True, True, True, True], [False, True, True, False]])
        >>> cut = d3s.random_prefixes(mask, draws=torch.tensor([0.6, 0.1]))
        >>> cut.mask, cut.weight
        (tensor([[ True,  True,  True, False],
                [False,  True, False, False]]), tensor([[1.0000, 1.3333, 2.0000, 0.0000],
                [0.0000, 1.0000, 0.0000, 0.0000]]))
    """
    if process_group is not None:
        from ..distributed import prefixes as across_ranks  # here, since some builds of torch have no process groups

        return Prefixes(*across_ranks.random_prefixes(mask, ratio, draws, generator, process_group, placement, offsets))
    present, share = prefix_arguments(mask, ratio, draws, generator, offsets)
    segments = segments_of(present, offsets)
    numbers = drawn(segments.number, draws, generator, present)
    return Prefixes(*cut_at(present, share, segments, numbers, lambda here: (here, torch.zeros_like(here))))
