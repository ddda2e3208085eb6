"""Tests on a GPU, with each back-end that runs there. They are skipped on other machines, except with
D3S_TEST_DEVICE=cpu: that runs the tests themselves, smaller and without graphs, on the CPU's kernels.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from every_op import GPU
from gpu_faults import pytest_runtest_call, pytest_runtest_logreport  # noqa: F401  hooks

from d3s_kernels._dispatch import backends

HERE = Path(__file__).parent
SERVED = {"cuda": "cpu", "torch": "torch"}  # in place of the GPU's back-ends, where there is none


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_gpu_only: of graphs, streams or waits, which a CPU has not")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        missing = not torch.cuda.is_available() and (GPU.type == "cuda" or item.get_closest_marker("on_gpu_only"))
        if HERE in item.path.parents and missing:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=backends.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The back-end that computes the ops in this test."""
    name = request.param if GPU.type == "cuda" else SERVED.get(request.param)
    if name not in backends.runnable(GPU.type):
        pytest.skip(backends.why_not(request.param) or f"D3S_KERNELS_BACKEND={backends.forced_backend}")
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()  # otherwise graphs recorded with another back-end's kernels would be replayed
    with backends.forced(name):
        yield name
