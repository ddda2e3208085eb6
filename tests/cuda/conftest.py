"""Tests on a GPU, by each back-end that runs there; elsewhere they are skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from d3s_kernels import _ops

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=_ops.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The one that computes the ops in this test."""
    if request.param not in _ops.runnable("cuda"):
        pytest.skip(_ops.why_not(request.param) or f"D3S_KERNELS_BACKEND={_ops.forced_backend}")
    torch._dynamo.reset()  # a graph that was recorded with another one's kernels would be replayed
    with _ops.forced(request.param):
        yield request.param
