"""`pytest benchmarks [--short]`; `python -m benchmarks` calls it and makes a table of what comes out."""

import pytest

from .harness import Contest
from .sizes import FULL, SHORT, Sizes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="small inputs and few rounds: does every benchmark run?")


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return SHORT if request.config.getoption("--short") else FULL


@pytest.fixture
def contest(benchmark, sizes: Sizes) -> Contest:
    return Contest(benchmark, sizes)
