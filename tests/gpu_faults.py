"""Hooks for tests on a GPU. A fault of a kernel shows at a later call, and no call works after it in that process. So
every test waits for the GPU at its end, and a process whose GPU has failed leaves: pytest-xdist names the test that it
ran, and starts another worker.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch


def fault() -> str | None:
    """What the GPU says when it is waited for; None where all is well."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:  # the workers share the memory
        torch.cuda.empty_cache()
    if (said := fault()) is not None:
        pytest.fail(f"the GPU failed during or after the last call: {said}", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """After the report of the call was sent, and before fixtures meet the fault."""
    if report.when != "teardown" and report.failed and (said := fault()) is not None:
        line = f"POISONED {report.nodeid}: {said.splitlines()[0]}"
        if folder := os.environ.get("D3S_TEST_CACHES"):
            with Path(folder, "gpu-faults.txt").open("a") as file:
                print(line, file=file)
        os.write(2, f"\n{line}\n".encode())  # pytest captures nothing here
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)
        pytest.exit(line, 70)
