"""Clocks that time a contender's turn, one for each kind of device; everything else is the same for all devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

Work = Callable[[], Any]

ONE_CALL = "one call"  # timed once; this time counts in every round
NOT_RECORDED = "events, since it waits"  # not replayed as a graph, because it waits for the GPU
SECONDS_PER_TURN = 0.01  # faster contenders are called several times a turn; short turns are seldom disturbed


class Inputs(NamedTuple):
    """What every contender is called with. A GPU's clock calls with further arguments in turn, so that what a call
    touches is no longer in the cache when its arguments come again.
    """

    arguments: tuple[Any, ...] = ()
    touched: int = 0  # bytes of the arguments that each contender touches at least
    further: Callable[[int], tuple[Any, ...]] | None = None  # the i-th arguments, from 1


def copied(*tensors: Tensor, touched: int | None = None) -> Inputs:
    """Tensors, of which a GPU's clock makes copies. `touched` is given where a contender does not touch all of them."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    every = sum(tensor.nbytes for tensor in tensors)
    return Inputs(tensors, every if touched is None else touched, lambda _: tuple(map(copy, tensors)))


class Reading(NamedTuple):
    """A GPU's clock and power during a turn."""

    megahertz: float  # of the multiprocessors
    watts: float | None


@dataclass(frozen=True)
class Prepared:
    """Work whose input is prepared before every call, untimed: a backward pass consumes its graph."""

    prepare: Callable[[], Any]
    work: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.work(self.prepare())


@dataclass(frozen=True)
class Once:
    """Work that takes too long on a CPU to be repeated. There it is timed once in a run, without a warm-up, and this
    time counts in every round of all its contests. That suffices if our own time is a small part of it. `judging.py`
    allows for an error of this single time. A GPU repeats the work.
    """

    work: Work

    def __call__(self) -> Any:
        return self.work()

    @cached_property
    def seconds(self) -> float:
        start = perf_counter()
        self.work()
        return perf_counter() - start


@dataclass(frozen=True)
class Ready:
    """Warmed-up work: the form in which it is timed, the calls per turn, and the timing method."""

    work: Work
    calls: int
    timed_by: str


class Clock(Protocol):
    def bind(self, work: Callable[..., Any], inputs: Inputs) -> Work:
        """The work, applied to these inputs."""

    def ready(self, work: Work) -> Ready:
        """Warms the work up, untimed: compilers run and caches fill here. Chooses the calls per turn."""

    def time(self, work: Work, calls: int) -> float:
        """The total seconds of this number of calls."""

    def reading(self) -> Reading | None:
        """The GPU's clock and power while it was last timed; None on a CPU, and where they cannot be read."""

    def peak_bytes(self, work: Work) -> int | None:
        """The peak memory of a call beyond what was allocated before; None if the process cannot measure it."""

    def works(self) -> bool:
        """Whether the device still works: after some errors CUDA fails until its process ends."""


class CpuClock:
    def bind(self, work: Callable[..., Any], inputs: Inputs) -> Work:
        return partial(work, *inputs.arguments) if inputs.arguments else work

    def ready(self, work: Work) -> Ready:
        return Ready(work, self.calls_per_turn(work), ONE_CALL if isinstance(work, Once) else "host")

    def calls_per_turn(self, work: Work) -> int:
        first, calls = self.time(work, 1), 1
        if first > 1 or isinstance(work, Prepared | Once):
            return 1
        while (took := self.time(work, calls)) < SECONDS_PER_TURN / 4:
            calls *= 4
        return math.ceil(calls * SECONDS_PER_TURN / took)

    def time(self, work: Work, calls: int) -> float:
        if isinstance(work, Once):
            return work.seconds
        if isinstance(work, Prepared):
            made = work.prepare()
            start = perf_counter()
            work.work(made)
            return perf_counter() - start
        repeat = range(calls)
        start = perf_counter()
        for _ in repeat:
            work()
        return perf_counter() - start

    def reading(self) -> Reading | None:
        return None

    def peak_bytes(self, work: Work) -> int | None:
        return None  # benchmarks/memory.py measures it, in a separate process per contender

    def works(self) -> bool:
        return True
