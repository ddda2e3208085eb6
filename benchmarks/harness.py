"""Contests: callables that compute the same result, timed in turns.

The speed of a machine varies over time. So the contenders of a contest take turns, round after round, and a disturbance
of the machine affects all contenders. judging.py compares their times.

A GPU that draws much power lowers its clock. If a contender's clock differs from ours in a round, the round is
repeated.

A contest that is out of time keeps the rounds that it has. A peer that cannot run is left out, and the log says why.
"""

import gc
import signal
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from .clock import Clock, CpuClock, Inputs, Reading, Ready, Work, copied
from .sizes import Sizes
from .timing import Contenders, Timing, same_clock

OURS = "d3s_kernels"
Agree = Callable[[str, Any, Any], None]
Record = Callable[[str, Contenders, dict[str, str]], None]

FEWEST_ROUNDS = 3
LONGEST = 100.0  # seconds after which a contest ends, even if it has too few rounds for a range
REST = 0.02  # seconds of rest before each turn, once clocks have differed: the GPU's power falls meanwhile
POISONED = 70  # the exit status of a process in which CUDA no longer works


class OutOfTime(Exception):
    """The test has used up its seconds."""


class Poisoned(Exception):
    """CUDA no longer works in this process; it failed while `contender` ran."""

    def __init__(self, contest: str, contender: str) -> None:
        super().__init__(f"{contest}: CUDA fails since {contender}")
        self.contest, self.contender = contest, contender


def alarm(seconds: float | None) -> None:
    """Raises `OutOfTime` in the main thread after this number of seconds; None cancels an earlier alarm."""

    def ring(*_: object) -> None:
        raise OutOfTime("it took too long")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)


class Contest:
    """The `contest` fixture. It checks that all contenders agree, lets them take turns, and records their times."""

    def __init__(
        self,
        record: Record,
        sizes: Sizes,
        clock: Clock | None = None,
        caller_clock: Clock | None = None,
        look: Callable[[], None] | None = None,
        judged: Container[str] = (),
        excluded: Container[str] = (),
        strict: bool = True,
    ) -> None:
        """`look` is called before, between and after rounds. `judged` names the contests that have a bound: only these
        need as many rounds as a range requires. `excluded` names contenders that made CUDA fail before. If `strict`,
        the test fails if a peer fails, but only after the results are recorded.
        """
        self.record = record
        self.sizes = sizes
        self.clock = clock or CpuClock()
        self.caller_clock = caller_clock or self.clock
        self.look = look
        self.judged = judged
        self.excluded = excluded
        self.strict = strict
        self.seconds: float | None = None  # a contest's limit, if any; if a peer uses it up, other peers get half of it
        self.name_ends = ""  # a file may set this end for the names of all its contests

    def limit(self, seconds: float | None) -> None:
        if self.seconds:
            alarm(seconds)

    def __call__(
        self,
        group: str,
        size: str,
        ours: Callable[..., Any] | None = None,
        *,
        inputs: tuple[Tensor, ...] | Inputs = (),
        peers: dict[str, Callable[..., Any] | None] | None = None,
        yardsticks: dict[str, Callable[..., Any] | None] | None = None,
        agree: Agree | None = None,
        of_caller: bool = False,
        with_range: bool = False,
    ) -> None:
        """Times `ours`, `peers` and `yardsticks`. `agree` compares the peers' results with ours. The yardsticks'
        results are not compared, since yardsticks do other work.

        A peer is None if it is not available on this machine. `inputs` are passed to every contender; a GPU's clock may
        copy them (see `Inputs`). `of_caller` measures the time until a call returns. `with_range` asks for as many
        rounds as a range needs, even if the contest has no bound.
        """
        passed = inputs if isinstance(inputs, Inputs) else copied(*inputs)
        group += self.name_ends
        clock = self.caller_clock if of_caller else self.clock
        self.limit(self.seconds)
        given = {OURS: ours} | (yardsticks or {}) | (peers or {})  # peers last: a peer that takes too long is left out
        roles = dict.fromkeys(given, "yardstick") | dict.fromkeys(peers or {}, "peer") | {OURS: "ours"}
        works: dict[str, Work] = {}
        ready: dict[str, Ready] = {}
        wrong: dict[str, str] = {}
        missing = {name: "CUDA failed at it" for name in given if name in self.excluded}
        wanted = {name: work for name, work in given.items() if work and name not in missing}

        def attempt(do: Callable[[str], None], name: str) -> None:
            try:
                do(name)
                if not clock.works():  # otherwise the next contender would be blamed
                    raise Poisoned(group, name)
            except Exception as problem:
                if not clock.works():
                    raise Poisoned(group, name) from problem
                if roles[name] == "ours":
                    raise
                because = wrong if isinstance(problem, AssertionError) else missing
                because[name] = f"{type(problem).__name__}: {problem}".strip()[:300]
                if isinstance(problem, OutOfTime):
                    self.limit(self.seconds and self.seconds / 2)

        def bind(name: str) -> None:
            works[name] = clock.bind(wanted[name], passed)

        def call(name: str) -> None:
            results[name] = works[name]()

        def compare(name: str) -> None:
            agree(name, results[OURS], works[name]())  # one at a time, since results may be large

        def warm_up(name: str) -> None:
            ready[name] = clock.ready(works[name])

        for name in wanted:
            attempt(bind, name)
        results: dict[str, Any] = {}
        if ours and agree:
            attempt(call, OURS)
            for name in [name for name in works if roles[name] == "peer"]:
                attempt(compare, name)
            results.clear()
        for name in [name for name in works if name not in missing | wrong]:
            attempt(warm_up, name)
        rounds = self.sizes.rounds if with_range or group in self.judged else FEWEST_ROUNDS
        turns = take_turns(ready, clock, self.sizes.seconds, rounds, self.sizes.most_rounds, self.look)
        self.limit(None)  # nothing may interrupt the recording of the results
        order = {name: ready[name] for name in (OURS, *(peers or {}), *(yardsticks or {})) if name in ready}
        self.record(
            group,
            {
                name: Timing(
                    role=roles[name],
                    size=size,
                    calls_per_round=how.calls,
                    seconds=turns.seconds[name],
                    timed_by=how.timed_by,
                    peak_bytes=clock.peak_bytes(works[name]),
                    megahertz=known([read and read.megahertz for read in turns.readings[name]]),
                    watts=known([read and read.watts for read in turns.readings[name]]),
                    rounds_taken_again=turns.taken_again,
                    did=getattr(wanted[name], "did", ""),
                )
                for name, how in order.items()
            },
            missing | wrong,
        )
        failed = wrong | (missing if self.strict else {})
        assert not failed, f"{group}: {failed}"


@dataclass(frozen=True)
class Turns:
    seconds: dict[str, list[float]]  # of one call of each contender, round by round
    readings: dict[str, list[Reading | None]]
    taken_again: int  # the number of rounds that do not count


def known(values: list[float | None]) -> list[float] | None:
    """The values; None if one of the values is not known, or if there are no values."""
    found = [value for value in values if value is not None]
    return found if found and len(found) == len(values) else None


def take_turns(
    ready: dict[str, Ready],
    clock: Clock,
    seconds: float,
    fewest_rounds: int,
    most_rounds: int,
    look: Callable[[], None] | None = None,
) -> Turns:
    """Times `fewest_rounds` rounds, unless they take too long. Then times more rounds until `seconds` have passed.

    A round in which clocks differed is repeated, but there are at most `fewest_rounds` repetitions. After these, a
    round counts even if clocks differ: some contenders draw so much power that the contenders never have the same
    clock. The log has the clocks of every round that counts.
    """
    seconds_of: dict[str, list[float]] = {name: [] for name in ready}
    readings: dict[str, list[Reading | None]] = {name: [] for name in ready}
    taken_again = 0
    look = look or (lambda: None)
    names = list(ready)
    first = OURS if OURS in ready else next(iter(ready), "")

    def allowed(rounds: int) -> float:
        return LONGEST if rounds < fewest_rounds else seconds

    def turn(name: str) -> tuple[float, Reading | None]:
        if taken_again:
            sleep(REST)
        return clock.time(ready[name].work, ready[name].calls) / ready[name].calls, clock.reading()

    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        look()
        start, rounds = perf_counter(), 0
        while rounds < FEWEST_ROUNDS or (rounds < most_rounds and perf_counter() - start < allowed(rounds)):
            times = {name: turn(name) for name in names}
            look()
            reads = {name: read for name, (_, read) in times.items()}
            if taken_again < fewest_rounds and clocks_differ(reads.get(first), reads.values()):
                taken_again += 1
                continue
            for name, (one, read) in times.items():
                seconds_of[name].append(one)
                readings[name].append(read)
            names.reverse()  # so that the order gives no contender an advantage
            rounds += 1
    except OutOfTime:
        if not rounds:
            raise
    finally:
        if collects:
            gc.enable()
    return Turns(seconds_of, readings, taken_again)


def clocks_differ(ours: Reading | None, every: Iterable[Reading | None]) -> bool:
    return any(ours and read and not same_clock(read.megahertz, ours.megahertz) for read in every)


def close(tolerance: float, **by_name: float) -> Agree:
    """Two results agree if their tensors differ by at most `tolerance`. A peer of low precision may have another
    tolerance in `by_name`.
    """

    def agree(name: str, ours: Any, theirs: Any) -> None:
        atol = by_name.get(name, tolerance)
        for mine, other in zip(as_tuple(ours), as_tuple(theirs), strict=True):
            torch.testing.assert_close(
                other.float().reshape(mine.shape), mine.float(), atol=atol, rtol=0, msg=lambda text: f"{name}: {text}"
            )

    return agree


def close_gradient(tolerance: float, **by_name: float) -> Agree:
    """Two gradients agree if the norm of their difference is at most `tolerance` times the norm of ours; `by_name` has
    other tolerances for some peers. Only every 15th token is compared. Among these are peaked rows and other rows.
    """

    def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        mine, other = ours[:, ::15].float(), theirs[:, ::15].float()
        error = (mine - other).norm() / mine.norm()
        assert error <= by_name.get(name, tolerance), f"{name}: the gradient is {error:.2g} off, relative in norm"

    return agree


def same_kept(share: float) -> Agree:
    """Two masks agree if the number of positions in which they differ is at most `share` times the number of kept
    positions. Peers may break ties or round k in another way.
    """

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
