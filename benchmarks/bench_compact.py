"""compact, which writes the indices of a mask's kept positions into a buffer of given capacity."""

import torch

import d3s_kernels as d3s

from . import inputs
from .harness import Contest, close, describe
from .sizes import Sizes


def test_compact(contest: Contest, sizes: Sizes) -> None:
    mask = inputs.entropies(*sizes.batch) > 8 * 0.9**4
    capacity = int(mask.sum())
    contest(
        "compact, one position in ten",
        describe(*sizes.batch),
        lambda mask: d3s.compact(mask, capacity)[0],
        inputs=(mask,),
        peers={
            "nonzero": lambda mask: mask.flatten().nonzero().squeeze(1),
            "nonzero_static": lambda mask: torch.nonzero_static(mask.flatten(), size=capacity, fill_value=-1).squeeze(
                1
            ),
        },
        agree=close(0),
    )
