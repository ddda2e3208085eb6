"""Options and fixtures of `pytest benchmarks`, which `python -m benchmarks` calls."""

import copy
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from . import inputs, machine, order
from .clock import Clock, CpuClock
from .cuda_clock import CallerClock, CudaClock, cuda_works
from .harness import POISONED, Contest, Poisoned, alarm
from .quiet import Probe
from .sizes import Sizes, sizes_for
from .targets import TARGETS
from .timing import Contenders, append, contest_line

START = monotonic()
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="small inputs and few rounds: does every benchmark run?")
    parser.addoption("--device", default="cpu", help="where the inputs are: cpu or cuda")
    parser.addoption("--rehearse", action="store_true", help="a GPU's contests on the CPU, in a GPU's order")
    parser.addoption("--headlines", action="store_true", help="the first contests of a GPU alone")
    parser.addoption("--seconds", type=float, help="a benchmark that would start later than this is skipped")
    parser.addoption("--log", type=Path, help="the file to which a line is added for each contest that has ended")
    parser.addoption("--exclude", action="append", default=[], metavar="CONTENDER", help="one that is left out")
    parser.addoption("--done", action="append", default=[], metavar="TEST", help="a test that is left out")


def pytest_configure(config: pytest.Config) -> None:
    rehearse = config.getoption("--rehearse")
    inputs.contests_of = "cuda" if rehearse else config.getoption("--device")
    inputs.device = torch.device("cpu" if rehearse else inputs.contests_of)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores SIGINT


def pytest_sessionstart(session: pytest.Session) -> None:
    log(session.config, {"facts": machine.describe(inputs.device.type)})


def log(config: pytest.Config, line: dict[str, Any]) -> None:
    if file := config.getoption("--log"):
        append(file, line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(config.getoption("--done"))
    headlines = config.getoption("--headlines")
    items[:] = [item for item in items if item.nodeid not in done]
    if headlines:
        items[:] = [item for item in items if order.is_headline(item.nodeid)]
    if inputs.contests_of == "cuda":
        items.sort(key=lambda item: order.place(item.nodeid)[0])


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--seconds")
    if limit and monotonic() - START > limit:
        pytest.skip(f"the run has had its {limit:.0f} seconds")
    item.stash[STARTED] = monotonic()
    log(item.config, {"began": item.nodeid})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if inputs.contests_of == "cuda":
        alarm(order.place(item.nodeid)[1])
    try:
        return (yield)
    finally:
        if inputs.contests_of == "cuda":
            alarm(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if STARTED in item.stash and (report.when == "call" or report.outcome != "passed"):
        why = f"{call.excinfo.typename}: {call.excinfo.value}"[:300] if call.excinfo else ""
        took = round(monotonic() - item.stash[STARTED], 2)
        log(item.config, {"ended": item.nodeid, "outcome": report.outcome, "seconds": took, "why": why})
        if inputs.contests_of == "cuda":
            print(f"\n{report.outcome} in {took:.1f} s: {item.nodeid} {why}", flush=True)
        if call.excinfo and inputs.device.type == "cuda" and not cuda_works():
            if isinstance(problem := call.excinfo.value, Poisoned):
                log(item.config, {"poisoned": [problem.contest, problem.contender]})
            print(report.longreprtext, flush=True)
            os._exit(POISONED)  # all later tests would fail too
    return report


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return sizes_for(inputs.contests_of, request.config.getoption("--short"))


@pytest.fixture(scope="session")
def both_clocks() -> tuple[Clock, Clock]:
    """Two clocks. The first times the work; the second times how long the caller waits until a call returns."""
    if inputs.device.type == "cpu":
        return CpuClock(), CpuClock()
    return CudaClock(inputs.device), CallerClock()


@pytest.fixture(scope="session")
def look(request: pytest.FixtureRequest) -> Callable[[], None] | None:
    """A function that logs how fast the machine is. None on a GPU, and in a short run, since a short run judges
    nothing.
    """
    if inputs.device.type != "cpu" or request.config.getoption("--short"):
        return None
    probe = Probe()
    probe()  # warms up
    return lambda: log(request.config, {"probe": probe()})


@pytest.fixture(scope="session")
def commit() -> str | None:
    return machine.commit()


def as_benchmarks(benchmark: Any, group: str, contenders: Contenders) -> None:
    """Makes each contender a benchmark of pytest-benchmark, with the contest as its group, for pytest-benchmark's table
    and files.
    """
    benchmark._mode = "contest"  # otherwise pytest-benchmark warns of an unused fixture
    for name, timing in contenders.items():
        row = copy.copy(benchmark)
        row.group, row.name, row.fullname, row.extra_info = group, name, f"{group}::{name}", {"size": timing.size}
        stats = row._make_stats(timing.calls_per_round)
        for seconds in timing.seconds:
            stats.update(seconds * timing.calls_per_round)


@pytest.fixture
def contest(
    request: pytest.FixtureRequest,
    benchmark: Any,
    sizes: Sizes,
    both_clocks: tuple[Clock, Clock],
    look: Callable[[], None] | None,
    commit: str | None,
) -> Contest:
    def record(name: str, contenders: Contenders, missing: dict[str, str]) -> None:
        log(request.config, contest_line(name, contenders, missing, commit))
        as_benchmarks(benchmark, name, contenders)

    judged = {target.contest for target in TARGETS[inputs.contests_of] if target.bound}
    excluded = request.config.getoption("--exclude")
    on_cpu = inputs.contests_of == "cpu"
    made = Contest(record, sizes, *both_clocks, look, judged, excluded, strict=on_cpu)
    made.seconds = None if on_cpu else order.place(request.node.nodeid)[1]
    return made
