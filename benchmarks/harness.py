"""Contests: callables that compute the same result, timed in turns.

The speed of a machine varies over time. So the contenders of a contest take turns, round after round. A ratio of two
contenders is computed in each round, and the median over the rounds is reported. pytest-benchmark gets each contender
as a separate benchmark, and each contest as a group.

On a CPU, rounds in which the machine was disturbed are made again: quiet.py.
"""

import copy
import gc
from collections.abc import Callable, Container
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .clock import Clock, CpuClock, Ready, Work
from .quiet import Watch
from .sizes import Sizes

OURS = "d3s_kernels"
Agree = Callable[[str, Any, Any], None]

FEWEST_ROUNDS, MOST_ROUNDS = 3, 21


class Contest:
    """The `contest` fixture: checks that all contenders agree, lets them take turns, records what each took."""

    def __init__(
        self,
        benchmark: Any,
        sizes: Sizes,
        clock: Clock | None = None,
        caller_clock: Clock | None = None,
        watch: Watch | None = None,
        judged: Container[str] = (),
    ) -> None:
        """`judged` are the contests that have a bound: only these need as many rounds as an interval takes."""
        self.benchmark = benchmark
        self.sizes = sizes
        self.clock = clock or CpuClock()
        self.caller_clock = caller_clock or self.clock
        self.watch = watch
        self.judged = judged
        self.name_ends = ""  # a file may add what its contests have in common

    def __call__(
        self,
        group: str,
        size: str,
        ours: Callable[..., Any] | None = None,
        *,
        inputs: tuple[Tensor, ...] = (),
        peers: dict[str, Callable[..., Any] | None] | None = None,
        yardsticks: dict[str, Callable[..., Any]] | None = None,
        agree: Agree | None = None,
        of_caller: bool = False,
    ) -> None:
        """Times `ours` against `peers`, whose equal results `agree` checks, and `yardsticks`, which do other work.

        A peer that is None is not available on this machine. `inputs` are passed to every contender; a GPU's clock may
        copy them. `of_caller` measures the time until a call returns.
        """
        self.benchmark._mode = "contest"  # else pytest-benchmark warns of a fixture that was not used
        clock = self.caller_clock if of_caller else self.clock
        roles = dict.fromkeys(peers or {}, "peer") | dict.fromkeys(yardsticks or {}, "yardstick") | {OURS: "ours"}
        given = {OURS: ours} | (peers or {}) | (yardsticks or {})
        contenders = {name: clock.bind(work, inputs) for name, work in given.items() if work is not None}
        if ours and agree:
            check(contenders[OURS], {name: contenders[name] for name in contenders if roles[name] == "peer"}, agree)
        rounds = self.sizes.rounds if group + self.name_ends in self.judged else FEWEST_ROUNDS
        turns, ready = take_turns(contenders, clock, self.sizes.seconds, rounds, self.watch)
        watched = asdict(self.watch.watched()) if self.watch else None
        for name, work in contenders.items():
            facts = {"size": size, "role": roles[name], "timed_by": ready[name].timed_by}
            facts |= {"peak_bytes": clock.peak_bytes(work), "watched": watched}
            self._record(group + self.name_ends, name, turns[name], ready[name].calls, facts)

    def _record(self, group: str, name: str, seconds: list[float], calls: int, extra_info: dict[str, Any]) -> None:
        """Records a contender as a benchmark, in the same way as pytest-benchmark's own fixture."""
        row = copy.copy(self.benchmark)
        row.group, row.name, row.fullname, row.extra_info = group, name, f"{group}::{name}", extra_info
        stats = row._make_stats(calls)
        for one in seconds:
            stats.update(one)


def check(ours: Work, peers: dict[str, Work], agree: Agree) -> None:
    """Checks the peers' results before anything is timed, one at a time, since results may be large."""
    expected = ours()
    for name, peer in peers.items():
        agree(name, expected, peer())


def take_turns(
    contenders: dict[str, Work], clock: Clock, seconds: float, fewest_rounds: int, watch: Watch | None = None
) -> tuple[dict[str, list[float]], dict[str, Ready]]:
    """The seconds per call of each contender in each round, and how each contender was timed."""
    ready = {name: clock.ready(work) for name, work in contenders.items()}
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if watch:
            watch.start(fewest_rounds)
        start, rounds = perf_counter(), 0
        while rounds < fewest_rounds or (rounds < MOST_ROUNDS and perf_counter() - start < seconds):
            began = perf_counter()
            times = {name: clock.time(ready[name].work, ready[name].calls) for name in names}
            took = perf_counter() - began
            if watch and watch.repeats(took):
                start += took  # the contest loses no time by it
                continue
            for name, one in times.items():
                turns[name].append(one)
            names.reverse()  # so that the order gives no contender an advantage
            rounds += 1
    finally:
        if collects:
            gc.enable()
    return turns, ready


def close(tolerance: float, **by_name: float) -> Agree:
    """All tensors agree within `tolerance`, or within the peer's tolerance in `by_name` (for low precision)."""

    def agree(name: str, ours: Any, theirs: Any) -> None:
        atol = by_name.get(name, tolerance)
        for mine, other in zip(as_tuple(ours), as_tuple(theirs), strict=True):
            torch.testing.assert_close(
                other.float().reshape(mine.shape), mine.float(), atol=atol, rtol=0, msg=lambda text: f"{name}: {text}"
            )

    return agree


def close_gradient(tolerance: float, **by_name: float) -> Agree:
    """Gradients agree within a relative error in norm, on every 15th token: peaked rows and others."""

    def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        mine, other = ours[:, ::15].float(), theirs[:, ::15].float()
        error = (mine - other).norm() / mine.norm()
        assert error <= by_name.get(name, tolerance), f"{name}: the gradient is {error:.2g} off, relative in norm"

    return agree


def same_kept(share: float) -> Agree:
    """Masks differ in at most this share of the kept positions, since peers may break ties or round k differently."""

    def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        differing = (ours ^ theirs.reshape(ours.shape)).sum().item()
        allowed = share * ours.sum().item()
        assert differing <= allowed, f"{name}: {differing} positions differ from ours, at most {allowed:.0f} may"

    return agree


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def describe(*shape: int, dtype: torch.dtype | None = None) -> str:
    """A shape and dtype as text: `1,024 x 64 float32`."""
    text = " x ".join(f"{n:,}" for n in shape)
    return f"{text} {str(dtype).removeprefix('torch.')}" if dtype else text
