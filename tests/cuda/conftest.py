"""Tests on a GPU; elsewhere they are skipped."""

from pathlib import Path

import pytest
import torch

from d3s_kernels import _ops

HERE = Path(__file__).parent
WHY = "needs a GPU" if not torch.cuda.is_available() else "" if _ops.has_cuda else "needs the CUDA library"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WHY and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=WHY))
