"""The metrics of the sets that tokens were drawn from, against counting by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from d3s_kernels.selection.metrics import SAMPLING_NAMES, set_metrics, set_sums


def test_the_numbers_also_summed_over_processes() -> None:
    sizes, mask = torch.randint(1, 40, (2, 7, 50)), torch.rand(2, 7, 50) < 0.8
    log_mass = -torch.rand(2, 7, 50)
    parts = [set_sums(*one, 64, mass) for *one, mass in zip(sizes, mask, log_mass, strict=True)]
    found = {name: float(value) for name, value in set_metrics(sum(parts), 1000).items()}
    counted = sizes[mask].double()
    columns = counted[counted > 1].sum()  # no column of a single token is computed
    assert found == pytest.approx({
        "d3s/set_size_mean": float(counted.mean()),
        "d3s/set_size_p99": float(np.percentile(counted.numpy(), 99, method="inverted_cdf")),
        "d3s/set_singletons": float((counted == 1).double().mean()),
        "d3s/set_mass": float(log_mass[mask].double().exp().mean()),
        "d3s/set_head_flops_saved": float(1 - columns / (1000 * len(counted))),
    })  # fmt: skip
    assert found.keys() == SAMPLING_NAMES.keys()


def test_what_is_not_known_is_nan() -> None:
    sizes, mask = torch.tensor([[1, 3], [2, 0]]), torch.tensor([[True, True], [True, False]])
    found = set_metrics(set_sums(sizes, mask, 8), 10)
    assert found.pop("d3s/set_mass").isnan()
    assert [round(float(value), 3) for value in found.values()] == [2.0, 3.0, 0.333, 0.833]
    none = set_metrics(set_sums(sizes, mask & False, 8, sizes.float()), 10)
    assert all(math.isnan(value) for value in none.values())
