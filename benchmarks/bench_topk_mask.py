"""topk_mask over the sequences of a batch, over one long segment, and over ragged rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import _torch

from . import inputs, peers
from .clock import copied
from .harness import Contest, describe, same_kept
from .sizes import Sizes
from .targets import FLASHINFER, RAGGED

# The number of scores in the last row of each request. FlashInfer's benchmark is a prefill of four requests with 128
# rows each. Every row has one score more than the row before it. With the numbers below, the shortest, the mean and the
# longest length of the rows are equal to the lengths that FlashInfer states.
LAST_ROWS = 502, 6_389, 9_389, 12_411


@pytest.mark.parametrize("ratio", [0.05, 0.10, 0.20])
@pytest.mark.parametrize("segments", ["batch", "segment"])
def test_topk_mask(contest: Contest, sizes: Sizes, segments: str, ratio: float) -> None:
    long = segments == "segment"
    shape = (sizes.segment,) if long else sizes.batch
    in_torch = _torch.KERNELS["topk_mask"]  # used for a long segment if there is no CUDA library
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


@pytest.mark.skipif(inputs.contests_of == "cpu", reason="FlashInfer runs on a GPU")
def test_ragged(contest: Contest, sizes: Sizes) -> None:
    rows, longest, k = sizes.batch[0], 2 * sizes.batch[1], sizes.batch[1] // 4
    lengths = prefill(rows // len(LAST_ROWS), longest).to(inputs.device)
    padded = inputs.advantages(rows, longest).bfloat16()
    present = torch.arange(longest, device=inputs.device) < lengths.unsqueeze(1)
    scores, offsets = padded[present], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    padded[~present] = -torch.inf
    starts, short = offsets[:-1].int(), lengths.int()

    def flashinfer(tie_break: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        indices = peers.flashinfer_indices()
        return indices and (lambda _, padded: indices(padded, starts, short, k, tie_break=tie_break))

    contest(
        RAGGED,
        f"{rows} rows of up to {lengths.max():,} of {longest:,}, {len(scores):,} in all, bfloat16, keep {k:,}",
        lambda scores, _: d3s.topk_mask(scores, k=k, offsets=offsets, max_segment=longest),
        inputs=copied(scores, padded, touched=min(scores.nbytes, padded.nbytes)),  # each contender reads one of the two
        peers={
            FLASHINFER: flashinfer(1),  # the lower index wins a tie, as in ours
            "topk + scatter": lambda _, padded: peers.topk_of_each(padded, k),
        },
        yardsticks={f"{FLASHINFER}, any of equal scores": flashinfer(0)},
        agree=same_kept_of_rows(present, 0.01),
    )


def prefill(rows_of_each: int, longest: int) -> Tensor:
    last = torch.tensor(LAST_ROWS) * longest // 16_384
    return (last.unsqueeze(1) - torch.arange(rows_of_each).flip(0)).flatten()


def same_kept_of_rows(present: Tensor, share: float) -> Callable[[str, Any, Any], None]:
    """Compares our flat mask with a peer's result: either a mask of padded rows, or flat indices. If a row has fewer
    than k scores, some of its indices are -1.
    """

    def agree(name: str, ours: Tensor, theirs: Tensor) -> None:
        if theirs.dtype == torch.bool:
            mask = theirs[present]
        else:
            mask = torch.zeros(len(ours) + 1, dtype=torch.bool, device=ours.device)
            mask[theirs.flatten().long()] = True  # -1 is the extra last element
            mask = mask[:-1]
        same_kept(share)(name, ours, mask)

    return agree
