"""A rank's shard of the vocabulary, and its communication with the ranks that have the other shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .._groups import Ranks


class Shard(NamedTuple):
    """The tokens from ``first_token`` on, as many as the logits or the weight have; all tokens if ``ranks`` is None.

    All ranks hold the same rows, so that all of them enter a collective, or none does because there are no rows.
    """

    first_token: int = 0
    ranks: Ranks | None = None

    @classmethod
    def of_group(cls, first_token: int, group_name: str) -> Shard:
        from .._groups import ranks_named  # here, since some builds of torch have no groups

        return cls(first_token, ranks_named(group_name))

    def everyones(self, states: Tensor) -> Tensor:
        """``[shards, rows, 4]``: the softmax states ``[rows, 4]`` of all ranks, in rank order."""
        return states if self.ranks is None or not len(states) else self.ranks.gather(states)

    def anyones_(self, mask: Tensor) -> Tensor:
        """The rows that are in the mask of at least one rank, in place."""
        if self.ranks is not None and len(mask):
            self.ranks.maximum_(mask.view(torch.uint8))
        return mask

    def total_(self, values: Tensor) -> Tensor:
        """The sum over the shards, in place."""
        return values if self.ranks is None or not len(values) else self.ranks.add_(values)


WHOLE = Shard()
