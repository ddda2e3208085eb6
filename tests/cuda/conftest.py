"""Tests on a GPU, with each back-end that runs there. They are skipped on other machines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from d3s_kernels._dispatch import backends

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=backends.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The back-end that computes the ops in this test."""
    if request.param not in backends.runnable("cuda"):
        pytest.skip(backends.why_not(request.param) or f"D3S_KERNELS_BACKEND={backends.forced_backend}")
    torch._dynamo.reset()  # otherwise graphs recorded with another back-end's kernels would be replayed
    with backends.forced(request.param):
        yield request.param
