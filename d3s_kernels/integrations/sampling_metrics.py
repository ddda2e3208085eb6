"""What tokens were drawn from, under the same names in every trainer; logged where sampling masks are recorded."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLING_NAMES = {
    "d3s/set_size_mean": "tokens that a token was drawn from; the mean over the tokens of all rollouts",
    "d3s/set_size_p99": "of 100 tokens, 99 were drawn from at most so many tokens",
    "d3s/set_singletons": "share of the tokens that were drawn from one token alone",
    "d3s/set_mass": "probability of a token's set before tokens were left out; the mean, where it is known",
    "d3s/set_head_flops_saved": "share of the LM head's FLOPs that the sets save: 1 - columns computed / all columns",
}
"""Every metric of the sets, and what it is."""


def set_sums(sizes: Tensor, mask: Tensor, most: int, log_mass: Tensor | None = None) -> Tensor:
    """What :func:`set_metrics` is computed from; sums of several processes may be added.

    Args:
        sizes: whole numbers of any shape: of how many tokens each token's set is, at most ``most``.
        mask: bool, likewise: the tokens that count.
        log_mass: float, likewise: the logarithm of each set's probability. None where it is not known.

    Returns:
        float64 ``[most + 2]``: how many tokens have a set of each size, from 0 on; the sum of the probabilities.
        Nothing waits for the device.
    """
    one = mask.flatten().double()
    counts = one.new_zeros(most + 1).index_add(0, sizes.flatten(), one)
    mass = counts.new_full((), torch.nan)
    if log_mass is not None:
        mass = torch.where(mask, log_mass.double().exp(), 0.0).sum()
    return torch.cat([counts, mass.view(1)])


def set_metrics(sums: Tensor, vocabulary: int | None = None) -> dict[str, Tensor]:
    """The metrics of the sets, from :func:`set_sums`. A mean over no tokens is NaN, and so is an unknown mass.

    A head over the sets computes the columns of a token's set, forward and backward, and none where the set has one
    token; a head over the whole vocabulary computes ``vocabulary`` columns. Without a number, the head computes all.
    """
    counts, mass = sums[:-1], sums[-1]
    sizes, tokens = torch.arange(len(counts), device=counts.device), counts.sum()
    columns = (sizes * counts).sum()
    beyond = counts.cumsum(0) < 0.99 * tokens  # the sizes that fewer than 99 % of the sets do not exceed
    found = {
        "d3s/set_size_mean": columns / tokens,
        "d3s/set_size_p99": torch.where(tokens > 0, beyond.sum().double(), torch.nan),
        "d3s/set_singletons": counts[1] / tokens,
        "d3s/set_mass": mass / tokens,
    }
    if vocabulary is not None:
        found["d3s/set_head_flops_saved"] = 1 - (columns - counts[1]) / (vocabulary * tokens)
    return found
