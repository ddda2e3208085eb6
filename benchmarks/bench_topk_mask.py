"""topk_mask over the sequences of a batch, and over one long segment."""

import pytest

import d3s_kernels as d3s
from d3s_kernels import _torch

from . import inputs, peers
from .harness import Contest, describe, same_kept
from .sizes import Sizes


@pytest.mark.parametrize("ratio", [0.05, 0.10, 0.20])
@pytest.mark.parametrize("segments", ["batch", "segment"])
def test_topk_mask(contest: Contest, sizes: Sizes, segments: str, ratio: float) -> None:
    long = segments == "segment"
    shape = (sizes.segment,) if long else sizes.batch
    in_torch = _torch.KERNELS["topk_mask"]  # used for a long segment without the CUDA library
    scores = inputs.advantages(*shape).abs() * inputs.entropies(*shape)
    contest(
        f"topk_mask of a {segments}, {ratio:.0%}",
        describe(*shape),
        lambda scores: d3s.topk_mask(scores, ratio),
        inputs=(scores,),
        peers={
            "topk + scatter": lambda scores: peers.topk_scatter(scores, ratio),
            "kthvalue": lambda scores: peers.kthvalue(scores, ratio),
            "quantile": lambda scores: peers.quantile(scores, ratio),
            "ours in plain PyTorch": (lambda scores: in_torch(scores, ratio)) if peers.ON_GPU and long else None,
        },
        agree=same_kept(0.01),
    )
