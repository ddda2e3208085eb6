"""DownSamplingSchedule: the budget at a point of training."""

import math
from itertools import pairwise

import pytest
import torch
from cases.draw import draws

from d3s_kernels import Budget, DownSamplingSchedule, progress_of

SHAPES = ("linear", "cosine", "exponential")


def test_the_defaults_are_the_papers() -> None:
    schedule = DownSamplingSchedule()
    assert schedule(0.0) == Budget(8, 0.05)
    assert schedule(0.5) == (20, pytest.approx(0.125))
    assert schedule(1.0) == Budget(32, 0.20)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ends_are_exact(shape: str) -> None:
    start, end = Budget(5, 0.07), Budget(19, 0.31)
    schedule = DownSamplingSchedule(start, end, shape)
    assert schedule(0) == start
    assert schedule(1) == end


def test_the_last_step_has_the_end() -> None:
    assert [progress_of(step, 4) for step in (0, 3, 4)] == [0, 1, 1]
    assert [progress_of(0, steps) for steps in (1, 0, -1)] == [0, 0, 0]


def test_the_shapes() -> None:
    """Cosine is linear in a smooth step; exponential grows by equal factors."""
    linear, cosine, exponential = (DownSamplingSchedule(Budget(8, 0.05), Budget(32, 0.20), shape) for shape in SHAPES)
    for progress in (0.0, 1e-9, 1.0, *torch.rand(9).tolist()):
        assert linear(progress).rollouts == math.floor(8 + 24 * progress + 0.5)
        assert linear(progress).token_ratio == pytest.approx((1 - progress) * 0.05 + progress * 0.20)
        step = 0.5 * (1 - math.cos(math.pi * progress))
        assert cosine(progress).token_ratio == pytest.approx((1 - step) * 0.05 + step * 0.20)
        assert exponential(progress).token_ratio == pytest.approx(0.05 * 4**progress)
        assert exponential(progress).rollouts == math.floor(8 * 4**progress + 0.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_never_turns_back_nor_leaves_its_ends(shape: str) -> None:
    for draw in draws():
        start, end = draw.integer(1, 64), draw.integer(1, 64)
        schedule = DownSamplingSchedule(Budget(start, start / 64), Budget(end, end / 64), shape)
        steps = [schedule(progress) for progress in (0, *sorted(torch.rand(4).tolist()), 1)]
        rising = steps if start <= end else steps[::-1]
        assert [step.rollouts for step in rising] == sorted(step.rollouts for step in rising)
        assert {start, end} == {steps[0].rollouts, steps[-1].rollouts}
        for early, late in pairwise(rising):
            assert early.token_ratio <= late.token_ratio + 1e-15


def test_rollouts_are_rounded_half_up() -> None:
    """Python's round goes to even; here 8.5 gives 9 and 9.5 gives 10."""
    assert DownSamplingSchedule(Budget(8, 0.1), Budget(9, 0.1))(0.5).rollouts == 9
    assert DownSamplingSchedule(Budget(9, 0.1), Budget(10, 0.1))(0.5).rollouts == 10


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("progress", [-0.01, 1.01, math.nan, math.inf, -math.inf])
def test_progress_outside_training(shape: str, progress: float) -> None:
    with pytest.raises(ValueError, match="progress"):
        DownSamplingSchedule(shape=shape)(progress)


BAD_BUDGETS = Budget(0, 0.1), Budget(8, 0.0), Budget(8, 1.5), Budget(8, math.nan)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("start", bad) for bad in BAD_BUDGETS), *(("end", bad) for bad in BAD_BUDGETS), ("shape", "square")],
)
def test_bad_arguments(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        DownSamplingSchedule(**{name: value})
