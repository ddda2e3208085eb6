"""The sets that tokens were drawn from: in TRL's batch, and on their way to the LM head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..._dispatch import ops
from ...sampling import SamplingMask

SETS = "d3s_sets"  # a batch's field: int32 [rows, tokens, width], the set of each token of the completions

# Of the forward that runs now: the sets of all its tokens, and which tokens have a label. None: over the vocabulary.
_sets_of_forwards: list[tuple[Tensor, Tensor] | None] = [None]


class OverSets:
    """A model that tells the head the sets of the tokens that it scores.

    TRL calls a model with the rows of a batch one part after the other, and gives labels to the tokens to score. The
    head gets the hidden states of labelled tokens alone.
    """

    def __init__(self, model: Callable[..., Any], sets: Tensor) -> None:
        self.model, self._sets, self._begin = model, sets, 0

    def __call__(self, *, labels: Tensor, **inputs: Any) -> Any:
        own = self._sets[self._begin : self._begin + len(labels)]
        self._begin += len(labels)
        with _scoring_over(own.flatten(0, 1), (labels[:, -own.shape[1] :] != -100).flatten()):
            return self.model(labels=labels, **inputs)


def over_sets(model: Callable[..., Any], sets: Tensor | None) -> Callable[..., Any]:
    """The model with scores over these sets.

    Args:
        sets: of the rows in the order in which the model will be called with them; their columns are the last ones of
            the labels. None: scores are over the whole vocabulary.
    """
    return model if sets is None else OverSets(model, sets)


@contextmanager
def _scoring_over(sets: Tensor, labelled: Tensor) -> Iterator[None]:
    _sets_of_forwards.append((sets, labelled))
    try:
        yield
    finally:
        _sets_of_forwards.pop()


def sets_of_rows(rows: int) -> SamplingMask | None:
    """The sets of the rows that the head was given; None where scores are over the whole vocabulary. Nothing waits for
    the device, since the head's caller knows the number of labelled tokens.
    """
    if _sets_of_forwards[-1] is None:
        return None
    sets, labelled = _sets_of_forwards[-1]
    places, _ = ops.compact(labelled, rows)
    return SamplingMask.from_padded(sets.index_select(0, places.clamp(min=0)))
