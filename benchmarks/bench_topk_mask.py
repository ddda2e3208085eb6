"""topk_mask over the sequences of a batch, and over one long segment."""

import pytest

import d3s_kernels as d3s

from . import inputs, peers
from .harness import Contest, describe, same_kept
from .sizes import Sizes


@pytest.mark.parametrize("ratio", [0.05, 0.10, 0.20])
@pytest.mark.parametrize("segments", ["batch", "segment"])
def test_topk_mask(contest: Contest, sizes: Sizes, segments: str, ratio: float) -> None:
    shape = sizes.batch if segments == "batch" else (sizes.segment,)
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
        },
        agree=same_kept(0.01),
    )
