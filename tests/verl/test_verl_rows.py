"""Which rows verl keeps: plain functions on tensors, which do not need verl."""

import doctest
import importlib
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3s_kernels.integrations.verl import D3SOptions
from d3s_kernels.integrations.verl.rows import rows_of_an_update, sessions
from d3s_kernels.selection.options import options_from


def test_verl_need_not_be_there() -> None:
    code = "import sys; sys.modules['verl'] = None; from d3s_kernels.integrations.verl import D3SOptions, rows"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_examples() -> None:
    module = importlib.import_module("d3s_kernels.integrations.verl.rows")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 1
    assert not results.failed


def test_outputs_of_a_rollout() -> None:
    """A uid may contain underscores. Outputs are in the order of their numbers, not of their names."""
    keys = ["my_uid_0_10", "my_uid_0_9", "my_uid_1_0", "your_uid_0_0"]
    assert sessions(keys) == [[2], [3], [1, 0]]


@given(st.integers(1, 400), st.integers(0, 300), st.integers(1, 100), st.integers(1, 16))
def test_rows_of_an_update(kept: int, dropped: int, before: int, unit: int) -> None:
    rows = kept + dropped
    found = rows_of_an_update(kept, rows, before, unit)
    updates = math.ceil(rows / before)  # verl pads to whole updates
    assert found % unit == 0
    assert math.ceil(kept / found) <= updates, "no more updates than without the selection"
    assert (found - unit) * updates < kept, "not a unit more than it takes"


@pytest.mark.parametrize("value", ["", True])
def test_a_field_without_a_name_is_refused(value: Any) -> None:
    """The other options: tests/trainers/test_trl_config.py."""
    with pytest.raises(ValueError, match=rf"^here\.sampling_mask_field: got {value!r}; takes "):
        options_from(D3SOptions, {"sampling_mask_field": value}, "here.")
