"""How fast this machine reads and copies memory, which limits every op that reads logits."""

import torch

from . import inputs
from .harness import Contest
from .sizes import Sizes


def test_bandwidth(contest: Contest, sizes: Sizes) -> None:
    source = inputs.advantages(sizes.sequences * sizes.tokens * sizes.vocabulary // 2)  # as many bytes as the logits
    target = torch.empty_like(source)
    contest(
        "memory bandwidth",
        f"{source.nbytes:,} bytes",
        yardsticks={"read": lambda: source.sum(), "copy": lambda: target.copy_(source)},
    )
