"""Contests: callables that answer the same question, timed in turns.

One machine is never equally fast for long. So the contenders of a contest take turns, round after round, and a ratio is
the median over the rounds of what two contenders took in the same round. pytest-benchmark gets every contender as a
benchmark of its own, all of one contest in one group.
"""

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from .sizes import Sizes

OURS = "d3s_kernels"
Work = Callable[[], Any]
Agree = Callable[[str, Any, Any], None]

SECONDS_PER_TURN = 0.02  # a contender faster than this is called several times a turn
MOST_ROUNDS = 21


@dataclass(frozen=True)
class Prepared:
    """Work on something that is made anew for every call, untimed: a backward pass uses up its graph."""

    prepare: Callable[[], Any]
    work: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.work(self.prepare())


class Contest:
    """The `contest` fixture: checks that all contenders agree, lets them take turns, records what each took."""

    def __init__(self, benchmark: Any, sizes: Sizes) -> None:
        self.benchmark = benchmark
        self.sizes = sizes

    def __call__(
        self,
        group: str,
        size: str,
        ours: Work | None = None,
        *,
        peers: dict[str, Work | None] | None = None,
        yardsticks: dict[str, Work] | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`peers` give the same result, which `agree` checks; `yardsticks` do other work to compare the time with.

        A peer that is None does not exist on this machine.
        """
        self.benchmark._mode = "contest"  # else pytest-benchmark warns of a fixture that was not used
        peers = {name: peer for name, peer in (peers or {}).items() if peer is not None}
        contenders = ({OURS: ours} if ours else {}) | peers | (yardsticks or {})
        if ours and agree:
            check(ours, peers, agree)
        turns, calls = take_turns(contenders, self.sizes.seconds, self.sizes.rounds)
        for name in contenders:
            role = "ours" if name == OURS else "peer" if name in peers else "yardstick"
            self._record(group, name, turns[name], calls[name], {"size": size, "role": role})

    def _record(self, group: str, name: str, seconds: list[float], calls: int, extra_info: dict[str, str]) -> None:
        """A benchmark of pytest-benchmark's, as its fixture would have recorded it after timing it alone."""
        row = copy.copy(self.benchmark)
        row.group, row.name, row.fullname, row.extra_info = group, name, f"{group}::{name}", extra_info
        stats = row._make_stats(calls)
        for one in seconds:
            stats.update(one)


def check(ours: Work, peers: dict[str, Work], agree: Agree) -> None:
    """No wrong result is ever timed. One peer's result at a time: they may be large."""
    expected = ours()
    for name, peer in peers.items():
        agree(name, expected, peer())


def take_turns(
    contenders: dict[str, Work], seconds: float, fewest_rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each contender's turn in each round, and the number of calls in such a turn."""
    calls = {name: calls_per_turn(work) for name, work in contenders.items()}
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start, rounds = perf_counter(), 0
        while rounds < fewest_rounds or (rounds < MOST_ROUNDS and perf_counter() - start < seconds):
            for name in names:
                turns[name].append(time(contenders[name], calls[name]))
            names.reverse()  # so that each follows and precedes each other one equally often
            rounds += 1
    finally:
        if collects:
            gc.enable()
    return turns, calls


def calls_per_turn(work: Work) -> int:
    """Also the warm-up: compilers run and caches fill here, and none of it is counted."""
    first, calls = time(work, 1), 1
    if first > 1 or isinstance(work, Prepared):
        return 1
    while (took := time(work, calls)) < SECONDS_PER_TURN / 4:
        calls *= 4
    return math.ceil(calls * SECONDS_PER_TURN / took)


def time(work: Work, calls: int) -> float:
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


def close(tolerance: float, **by_name: float) -> Agree:
    """All tensors agree within `tolerance`, or within the peer's own, where it computes in low precision."""

    def agree(name: str, ours: Any, theirs: Any) -> None:
        atol = by_name.get(name, tolerance)
        for mine, other in zip(as_tuple(ours), as_tuple(theirs), strict=True):
            torch.testing.assert_close(
                other.float().reshape(mine.shape), mine.float(), atol=atol, rtol=0, msg=lambda text: f"{name}: {text}"
            )

    return agree


def same_kept(share: float) -> Agree:
    """Masks differ in at most this share of the kept positions: peers break ties, or round k, in their own way."""

    def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        differing = (ours ^ theirs.reshape(ours.shape)).sum().item()
        allowed = share * ours.sum().item()
        assert differing <= allowed, f"{name}: {differing} positions differ from ours, at most {allowed:.0f} may"

    return agree


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def describe(*shape: int, dtype: torch.dtype | None = None) -> str:
    """`1,024 x 64 float32`"""
    text = " x ".join(f"{n:,}" for n in shape)
    return f"{text} {str(dtype).removeprefix('torch.')}" if dtype else text
