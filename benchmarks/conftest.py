"""Options and fixtures of `pytest benchmarks [--short] [--device cuda]`, which `python -m benchmarks` calls."""

from time import monotonic

import pytest
import torch

from . import inputs
from .clock import Clock, CpuClock
from .cuda_clock import CallerClock, CudaClock
from .harness import Contest
from .quiet import Probe, Watch
from .sizes import Sizes, sizes_for
from .targets import TARGETS

START = monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="small inputs and few rounds: does every benchmark run?")
    parser.addoption("--device", default="cpu", help="where the inputs are: cpu or cuda")
    parser.addoption("--seconds", type=float, help="a benchmark that would start later than this is skipped")


def pytest_configure(config: pytest.Config) -> None:
    inputs.device = torch.device(config.getoption("--device"))


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return sizes_for(inputs.device.type, request.config.getoption("--short"))


@pytest.fixture(scope="session")
def both_clocks() -> tuple[Clock, Clock]:
    """One clock for the work, and one for the time that a call takes from its caller."""
    if inputs.device.type == "cpu":
        return CpuClock(), CpuClock()
    return CudaClock(inputs.device), CallerClock()


@pytest.fixture(scope="session")
def watch(request: pytest.FixtureRequest) -> Watch | None:
    """What decides which rounds are made again; a short run judges nothing, and a GPU has no such probe."""
    short = request.config.getoption("--short")
    return Watch(Probe()) if inputs.device.type == "cpu" and not short else None


@pytest.fixture
def contest(
    request: pytest.FixtureRequest, benchmark, sizes: Sizes, both_clocks: tuple[Clock, Clock], watch: Watch | None
) -> Contest:
    limit = request.config.getoption("--seconds")
    if limit and monotonic() - START > limit:
        pytest.skip(f"the run has had its {limit:.0f} seconds")
    judged = {target.contest for target in TARGETS[inputs.device.type] if target.bound}
    return Contest(benchmark, sizes, *both_clocks, watch, judged)
