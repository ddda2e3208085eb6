"""What one turn of a contender took. A clock for each kind of device; everything else is the same for all."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

Work = Callable[[], Any]

SECONDS_PER_TURN = 0.02  # a contender faster than this is called several times a turn


@dataclass(frozen=True)
class Prepared:
    """Work on something that is made anew for every call, untimed: a backward pass uses up its graph."""

    prepare: Callable[[], Any]
    work: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.work(self.prepare())


@dataclass(frozen=True)
class Ready:
    """Work that was warmed up: in what form it is timed, how often in a turn, and by what."""

    work: Work
    calls: int
    timed_by: str


class Clock(Protocol):
    def bind(self, work: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Work:
        """The work on these tensors."""

    def ready(self, work: Work) -> Ready:
        """Also the warm-up: compilers run and caches fill here, and none of it is counted."""

    def time(self, work: Work, calls: int) -> float:
        """Seconds of so many calls together."""

    def peak_bytes(self, work: Work) -> int | None:
        """What a call holds at its peak beyond what was held before; None where that cannot be seen from inside."""


class CpuClock:
    def bind(self, work: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Work:
        return partial(work, *tensors) if tensors else work

    def ready(self, work: Work) -> Ready:
        return Ready(work, self.calls_per_turn(work), "host")

    def calls_per_turn(self, work: Work) -> int:
        first, calls = self.time(work, 1), 1
        if first > 1 or isinstance(work, Prepared):
            return 1
        while (took := self.time(work, calls)) < SECONDS_PER_TURN / 4:
            calls *= 4
        return math.ceil(calls * SECONDS_PER_TURN / took)

    def time(self, work: Work, calls: int) -> float:
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

    def peak_bytes(self, work: Work) -> int | None:
        return None  # benchmarks/memory.py asks the system, in a process for each contender
