"""Measures how fast this machine reads and copies memory, which limits every op that reads logits. On a GPU, also
measures how fast it multiplies matrices, which limits the LM head.
"""

import pytest
import torch

from . import inputs
from .harness import Contest, describe
from .sizes import Sizes


def test_bandwidth(contest: Contest, sizes: Sizes) -> None:
    source = inputs.advantages(sizes.sequences * sizes.tokens * sizes.vocabulary // 2)  # as many bytes as the logits
    target = torch.empty_like(source)
    contest(
        "memory bandwidth",
        f"{source.nbytes:,} bytes",
        yardsticks={"read": lambda: source.sum(), "copy": lambda: target.copy_(source)},
    )


@pytest.mark.skipif(inputs.contests_of == "cpu", reason="the head's own yardsticks are products")
def test_product(contest: Contest, sizes: Sizes) -> None:
    hidden, weight, _ = inputs.lm_head(sizes, "wide", torch.bfloat16)
    square = torch.empty(2 * sizes.head_tokens, 2 * sizes.head_tokens, dtype=hidden.dtype, device=hidden.device)
    square.normal_()
    for left, right in ((square, square), (hidden, weight.T)):
        shape = *left.shape, right.shape[1]
        out = torch.empty(len(left), right.shape[1], dtype=left.dtype, device=left.device)
        size = describe(*shape, dtype=left.dtype)
        work = {"product": lambda left=left, right=right, out=out: torch.mm(left, right, out=out)}
        contest(f"bare product, {'square' if left is square else 'of the head'}", size, yardsticks=work)
