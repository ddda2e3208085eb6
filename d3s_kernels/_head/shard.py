"""Which tokens a rank has of the vocabulary, and what it asks of the ranks that have the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .._groups import Ranks


class Shard(NamedTuple):
    """The tokens from ``first_token`` on, as many as the logits or the weight have: all where ``ranks`` is None.

    Rows are the same on all ranks, and so a rank that has rows to tell of is never alone with them.
    """

    first_token: int = 0
    ranks: Ranks | None = None

    @classmethod
    def of_group(cls, first_token: int, group_name: str) -> Shard:
        from .._groups import ranks_named  # here, as there are builds of torch that know no groups

        return cls(first_token, ranks_named(group_name))

    def everyones(self, states: Tensor) -> Tensor:
        """``[shards, rows, 4]``, in the order of the ranks, of each one's softmax states ``[rows, 4]``."""
        return states if self.ranks is None or not len(states) else self.ranks.gather(states)

    def anyones_(self, mask: Tensor) -> Tensor:
        """The rows that are in any rank's mask."""
        if self.ranks is not None and len(mask):
            self.ranks.maximum_(mask.view(torch.uint8))
        return mask

    def total_(self, values: Tensor) -> Tensor:
        """The sum over the shards, in place."""
        return values if self.ranks is None or not len(values) else self.ranks.add_(values)


WHOLE = Shard()
