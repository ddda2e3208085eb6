"""Clocks that time a contender's turn, one for each kind of device; everything else is the same for all devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

Work = Callable[[], Any]

FEW_CALLS = "fastest of three calls"  # the time of this call counts in every round
NOT_RECORDED = "events, since it waits"  # the work is not replayed as a graph, because it waits for the GPU
SECONDS_PER_TURN = 0.01  # a call that is shorter is repeated within a turn; short turns are seldom disturbed


class Inputs(NamedTuple):
    """The arguments of every contender. A GPU's clock makes further arguments, and uses all arguments one after the
    other. So when arguments are used again, their data are no longer in the cache.
    """

    arguments: tuple[Any, ...] = ()
    touched: int = 0  # each contender touches at least this many bytes of its arguments
    further: Callable[[int], tuple[Any, ...]] | None = None  # makes the i-th further arguments, from i = 1


def copied(*tensors: Tensor, touched: int | None = None) -> Inputs:
    """Inputs that are tensors; a GPU's clock copies them. Pass `touched` if a contender does not touch all of their
    bytes.
    """

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
    """Work whose input is prepared before every call; the preparation is not timed. For example, a backward pass needs
    a new graph for each call.
    """

    prepare: Callable[[], Any]
    work: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.work(self.prepare())


@dataclass(frozen=True)
class Slow:
    """Work that takes too long on a CPU to be repeated in every round. A CPU's clock calls it three times in a run, and
    the fastest call counts in every round of all contests with this work. Three calls are enough if our own time is
    much shorter. `judging.py` makes the range wider, since the time of the fastest call has an error. A GPU's clock
    repeats the work.
    """

    work: Work

    def __call__(self) -> Any:
        return self.work()

    @cached_property
    def seconds(self) -> float:
        times = []
        for _ in range(3):
            start = perf_counter()
            self.work()
            times.append(perf_counter() - start)
        return min(times)

    @property
    def did(self) -> str:
        return getattr(self.work, "did", "")


@dataclass(frozen=True)
class Ready:
    """Warmed-up work: the form in which it is timed, the calls per turn, and the timing method."""

    work: Work
    calls: int
    timed_by: str


class Clock(Protocol):
    def bind(self, work: Callable[..., Any], inputs: Inputs) -> Work:
        """The work as a callable without arguments, which uses these inputs."""

    def ready(self, work: Work) -> Ready:
        """Runs the work without timing it, so that compilers run and caches fill. Then chooses the number of calls per
        turn.
        """

    def time(self, work: Work, calls: int) -> float:
        """The seconds that this number of calls takes together."""

    def reading(self) -> Reading | None:
        """The GPU's clock and power during the last timed turn; None on a CPU, or if they cannot be read."""

    def peak_bytes(self, work: Work) -> int | None:
        """The peak memory of a call beyond the memory that was allocated before it; None if the process cannot measure
        the peak.
        """

    def works(self) -> bool:
        """Whether the device still works: after some errors CUDA fails until its process ends."""


class CpuClock:
    def bind(self, work: Callable[..., Any], inputs: Inputs) -> Work:
        return partial(work, *inputs.arguments) if inputs.arguments else work

    def ready(self, work: Work) -> Ready:
        return Ready(work, self.calls_per_turn(work), FEW_CALLS if isinstance(work, Slow) else "host")

    def calls_per_turn(self, work: Work) -> int:
        first, calls = self.time(work, 1), 1
        if first > 1 or isinstance(work, Prepared | Slow):
            return 1
        while (took := self.time(work, calls)) < SECONDS_PER_TURN / 4:
            calls *= 4
        return math.ceil(calls * SECONDS_PER_TURN / took)

    def time(self, work: Work, calls: int) -> float:
        if isinstance(work, Slow):
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
