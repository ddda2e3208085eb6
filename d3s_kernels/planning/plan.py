"""sGPO's plan, from one profiling pass: which queries to train on, in which order, and with how many rollouts each."""

from __future__ import annotations

import math
import numbers
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from .._arguments.checks import require_number, require_rule, whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

Array = TypeVar("Array", Tensor, "npt.NDArray[Any]")

NOT_TRAINED = -1
"""The phase of a query that is not trained on."""

EVERY_PHASE = -2
"""The phase and the group size of a kept unsolved query, which every phase serves with the phase's own group size."""


@dataclass(frozen=True, eq=False)
class RolloutPlan(Generic[Array]):
    """The result of :func:`plan_rollouts`. Its arrays are int64 and have one value per query. They are tensors if
    ``successes`` was a tensor, else NumPy arrays.

    Attributes:
        group_size: the number of rollouts of the query; 0 if the query is not trained on; ``EVERY_PHASE`` (-2) for a
            kept unsolved query.
        phase: the phase of the query, from 0 (the smallest group size, the easiest queries) on; ``NOT_TRAINED`` (-1) if
            the query is not trained on; ``EVERY_PHASE`` for a kept unsolved query.
        phase_sizes: the group size of each phase, ascending. Every phase has at least one query of its own.
    """

    group_size: Array
    phase: Array
    phase_sizes: tuple[int, ...]

    def queries(self, phase: int) -> Array:
        """Returns the indices of the phase's own queries and of all kept unsolved queries, int64, ascending."""
        phase = whole_number("phase", phase)
        if not 0 <= phase < len(self.phase_sizes):
            raise ValueError(f"phase: got {phase}; takes 0 to {len(self.phase_sizes) - 1}")
        phases: list[int] = self.phase.tolist()
        return _like(self.phase, [query for query, number in enumerate(phases) if number in (phase, EVERY_PHASE)])


def plan_rollouts(
    successes: Array,
    samples: int | Array,
    *,
    trivial_above: float = 0.75,
    keep_unsolved: float = 0.1,
    group_sizes: Sequence[int] = (2, 4, 8),
    rule: Literal["buckets", "inverse_success_rate"] = "buckets",
    seed: int = 0,
) -> RolloutPlan[Array]:
    """Makes sGPO's plan (arXiv 2606.08854): rarely solved queries get large groups, and easy queries come first.

    Let p = successes / samples be the rate at which the initial policy solves a query. The plan depends on p:

    - p > ``trivial_above``: the query is trivial, and is not trained on.
    - p = 0: the query is unsolved. A random share ``keep_unsolved`` of the unsolved queries is served in every phase,
      with that phase's group size; the other unsolved queries are not trained on.
    - Otherwise: the group size is about 1 / p, so that one success is expected in a group. "buckets" chooses the
      largest of ``group_sizes`` that is at most 1 / p. If all of ``group_sizes`` are larger, it chooses the smallest.
      "inverse_success_rate" rounds 1 / p up, and clamps it to the range of ``group_sizes``. Queries with the same group
      size form a phase. Phases are in ascending order of group size.

    p is never rounded: 7 of 10 is not above 0.7. The paper profiles with 8 samples at one temperature, and has buckets
    for powers of two; other numbers of samples and other group sizes are treated in the same way. The paper leaves two
    points open:

    - The number of kept unsolved queries is ``keep_unsolved`` times the number of unsolved queries, rounded half up.
      The kept queries are drawn once for all phases, with ``seed``.
    - A group size without a query has no phase. If every query is trivial or unsolved, there is no phase at all: no
      query is served, not even a kept unsolved one, and :class:`PlanSampler` refuses the plan.

    Args:
        successes: the number of successes of each query, ``[queries]``: a tensor or NumPy array of any integer dtype.
        samples: the number of samples of each query, at least 1: either one number for all queries, or ``[queries]``, a
            tensor or NumPy array like ``successes``.
        trivial_above: in [0, 1].
        keep_unsolved: in [0, 1].
        group_sizes: whole numbers of at least 2, ascending. (In a group of one, the advantage is always 0.)
        rule: "buckets" or "inverse_success_rate".
        seed: any whole number.

    Returns:
        A :class:`RolloutPlan`, with tensors on the device of ``successes``, or with NumPy arrays.

    Raises:
        ValueError, TypeError: a query has no samples, or more successes than samples; an argument has a wrong shape,
            dtype, type or value.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> plan = d3s.plan_rollouts(torch.tensor([0, 1, 2, 3, 6, 7]), 8, keep_unsolved=1.0)
        >>> plan.group_size
        tensor([-2,  8,  4,  2,  2,  0])
        >>> [(size, plan.queries(phase).tolist()) for phase, size in enumerate(plan.phase_sizes)]
        [(2, [0, 3, 4]), (4, [0, 2]), (8, [0, 1])]
    """
    profile = _profile(successes, samples)
    trivial, kept_share = _share("trivial_above", trivial_above), _share("keep_unsolved", keep_unsolved)
    sizes = tuple(whole_number("group_sizes", size) for size in group_sizes)
    if not sizes or sizes[0] < 2 or any(low >= high for low, high in pairwise(sizes)):
        raise ValueError(f"group_sizes: got {sizes}; takes whole numbers from 2 on, ascending")
    require_rule(rule, ("buckets", "inverse_success_rate"))
    seed = whole_number("seed", seed)

    size_of: dict[tuple[int, int], int] = {}
    for solved, sampled in set(profile):  # once for each distinct pair, since there are few
        if solved == 0 or solved * trivial.denominator > sampled * trivial.numerator:  # unsolved, or p > trivial
            continue
        if rule == "buckets":
            size = max((size for size in sizes if size * solved <= sampled), default=sizes[0])
        else:
            size = min(max(-(-sampled // solved), sizes[0]), sizes[-1])
        size_of[solved, sampled] = size
    group_size = [size_of.get(pair, 0) for pair in profile]
    phase_sizes = tuple(sorted(set(size_of.values())))
    phase_of = {0: NOT_TRAINED} | {size: phase for phase, size in enumerate(phase_sizes)}
    phase = [phase_of[size] for size in group_size]

    unsolved = [query for query, (solved, _) in enumerate(profile) if solved == 0]
    kept = math.floor(kept_share * len(unsolved) + Fraction(1, 2))
    for place in shuffled(len(unsolved), seed, "unsolved")[:kept].tolist():
        group_size[unsolved[place]] = phase[unsolved[place]] = EVERY_PHASE
    return RolloutPlan(_like(successes, group_size), _like(successes, phase), phase_sizes)


def _profile(successes: Array, samples: int | Array) -> list[tuple[int, int]]:
    """Checks the arguments. Returns a pair (successes, samples) for each query."""
    solved = _counts("successes", successes)
    if isinstance(samples, numbers.Integral) and not isinstance(samples, bool):
        sampled = [int(samples)] * len(solved)
    else:
        sampled = _counts("samples", samples)
        if isinstance(samples, Tensor) != isinstance(successes, Tensor):
            kinds = type(samples).__name__, type(successes).__name__
            raise TypeError(f"samples: got {kinds[0]}; takes a number, or the kind of successes, {kinds[1]}")
        if len(sampled) != len(solved):
            raise ValueError(f"samples: got {len(sampled)} numbers; takes one, or one for each query: {len(solved)}")
    profile = list(zip(solved, sampled, strict=True))
    for query, (count, total) in enumerate(profile):
        if total < 1:
            raise ValueError(
                f"samples: got {total} at query {query}; takes at least 1: nothing is known of a query without samples"
            )
        if not 0 <= count <= total:
            raise ValueError(f"successes: got {count} at query {query}; takes 0 to its number of samples, {total}")
    return profile


def _counts(name: str, values: Any) -> list[int]:
    """Returns the values of a 1-D tensor or NumPy array of whole numbers as a list."""
    numpy = sys.modules.get("numpy")  # if ``values`` is an array, NumPy is imported already; torch does not need it
    if isinstance(values, Tensor):
        whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    elif numpy is not None and isinstance(values, numpy.ndarray):
        whole = values.dtype.kind in "iu"
    else:
        raise TypeError(f"{name}: got {type(values).__name__}; takes a tensor or NumPy array of whole numbers")
    if not whole:
        raise TypeError(f"{name}: got dtype {values.dtype}; takes an integer dtype")
    if values.ndim != 1:
        raise ValueError(f"{name}: got shape {list(values.shape)}; takes one dimension, a number for each query")
    return values.tolist()


def _share(name: str, value: float) -> Fraction:
    """Returns the fraction that the decimal text of ``value`` denotes: 0.1 is exactly one tenth."""
    if value is not None:
        require_number(**{name: value})
    if value is None or not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value}; takes a number in [0, 1]")
    return Fraction(str(value))


def _like(kind: Array, values: list[int]) -> Array:
    """Returns the values as int64: a NumPy array if ``kind`` is one, else a tensor on the same device as ``kind``."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.to(kind.device) if isinstance(kind, Tensor) else tensor.numpy()


def shuffled(count: int, *key: object) -> Tensor:
    """Returns the integers from 0 to ``count`` - 1, as int64, in a random order that depends only on ``key``.

    A restarted run needs the same order again, perhaps with newer libraries. Python guarantees that ``random()``
    returns the same numbers in every release; torch and NumPy give no such guarantee for their permutations.
    """
    generator = random.Random("/".join(map(str, key)))
    drawn = [generator.random() for _ in range(count)]
    return torch.tensor(drawn, dtype=torch.float64).argsort(stable=True)
