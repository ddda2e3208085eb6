"""Priced time: what was done, counted, and the seconds that each piece of it costs.

Time is priced, so that a run's result depends on its seed alone, and not on what else the machine does. All arms get
the same priced time. Other prices give other time axes of the same runs.
"""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    generated: int = 0  # tokens that were sampled
    scored: int = 0  # rows whose entropy was computed, without a gradient: the LM head's forward
    updated: int = 0  # rows that went forward and backward through the body: prompts and completions
    kept: int = 0  # tokens in the loss: the LM head's forward and backward
    steps: int = 0  # of the optimiser

    def __add__(self, other: tuple[int, ...]) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Prices(NamedTuple):
    """Seconds of one piece of each."""

    generated: float
    scored: float
    updated: float
    kept: float
    steps: float

    def of(self, counts: Counts) -> float:
        return sum(price * count for price, count in zip(self, counts, strict=True))

    def of_update(self, counts: Counts) -> float:
        """All but the generation."""
        return self.of(counts._replace(generated=0))

    def with_generation_at(self, share: float, counts: Counts) -> Prices:
        """These prices, but that the generation of ``counts`` costs ``share`` times its update."""
        return self._replace(generated=share * self.of_update(counts) / counts.generated)
