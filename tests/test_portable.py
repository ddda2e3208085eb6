"""The tests of the ops on the back-ends written in Python: plain PyTorch, and Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
from helpers import EVERYTHING, layer
from test_cuda_emulated import RUNS, TESTS, run_pytest


@pytest.mark.parametrize("suite", RUNS, ids=lambda suite: suite[0])
def test_on_plain_pytorch(suite: tuple[str, ...], record_property: Callable) -> None:
    files = [str(TESTS / name) for name in suite]
    examples = os.environ.get("D3S_TEST_EXAMPLES", "10" if EVERYTHING else "5")
    printed = run_pytest(*files, D3S_KERNELS_BACKEND="torch", D3S_TEST_EXAMPLES=examples)
    record_property(*layer("the ops in plain PyTorch", printed))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_in_the_interpreter_of_triton(record_property: Callable) -> None:
    """Runs tests with small shapes, because the interpreter takes milliseconds for each program."""
    here = {"D3S_KERNELS_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    examples = os.environ.get("D3S_TEST_EXAMPLES", "20" if EVERYTHING else "5")
    printed = run_pytest(str(TESTS / "triton_interpreted.py"), **here, D3S_TEST_EXAMPLES=examples)
    record_property(*layer("the ops in Triton's interpreter", printed))
