"""The back-ends beside each other, on a GPU."""

from __future__ import annotations

import pytest
import torch
from every_op import NAMES, calls, tensors
from helpers import assert_gradient, assert_identical
from torch import Tensor

from d3s_kernels import _ops


def assert_agree(one: Tensor, other: Tensor) -> None:
    """Selections and groups to the bit; what is summed over logits or rewards within what float32 needs."""
    if one.dtype == torch.float32:
        torch.testing.assert_close(one, other, rtol=2**-22, atol=1e-5, equal_nan=True)
    elif one.dtype == torch.bfloat16:
        assert_gradient(one, other)
    else:
        assert_identical(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_all_give_the_same(name: str) -> None:
    call = calls()[name]
    results = []
    for backend in _ops.runnable("cuda"):
        with _ops.forced(backend):
            results.append(tensors(call()))
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert_agree(one, other)
