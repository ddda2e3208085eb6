"""plan_rollouts: which queries are trained on, when, and with how many rollouts."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from d3s_kernels import EVERY_PHASE, NOT_TRAINED, RolloutPlan, plan_rollouts

profiles = st.lists(
    st.integers(1, 40).flatmap(lambda samples: st.tuples(st.integers(0, samples), st.just(samples))), max_size=40
)


def planned(profile: list[tuple[int, int]], **options: Any) -> RolloutPlan[Any]:
    successes, samples = torch.tensor(profile, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return plan_rollouts(successes, samples, **options)


def test_eight_samples_as_in_the_paper_and_by_the_inverse_of_the_rate() -> None:
    plan = plan_rollouts(torch.arange(9), 8)
    assert plan.group_size.tolist() == [0, 8, 4, 2, 2, 2, 2, 0, 0]
    assert plan.phase.tolist() == [NOT_TRAINED, 2, 1, 0, 0, 0, 0, NOT_TRAINED, NOT_TRAINED]
    assert plan.phase_sizes == (2, 4, 8)
    assert [plan.queries(phase).tolist() for phase in range(3)] == [[3, 4, 5, 6], [2], [1]]
    plan = plan_rollouts(torch.arange(9), 8, rule="inverse_success_rate")
    assert plan.group_size.tolist() == [0, 8, 4, 3, 2, 2, 2, 0, 0]
    assert plan.phase_sizes == (2, 3, 4, 8)


@given(profiles, st.sets(st.integers(2, 50), min_size=1), st.sampled_from(["buckets", "inverse_success_rate"]))
def test_any_sizes(profile: list[tuple[int, int]], sizes: set[int], rule: Any) -> None:
    ascending = sorted(sizes)
    plan = planned(profile, group_sizes=ascending, rule=rule, trivial_above=1.0, keep_unsolved=0.0)
    for (successes, samples), size in zip(profile, plan.group_size.tolist(), strict=True):
        if successes == 0:
            assert size == 0
        elif rule == "inverse_success_rate":
            assert size == sorted([ascending[0], -(-samples // successes), ascending[-1]])[1]
        else:
            assert size in sizes
            assert size == ascending[0] or Fraction(successes, samples) <= Fraction(1, size)
            assert not any(size < other and Fraction(successes, samples) <= Fraction(1, other) for other in sizes)


@given(profiles, st.floats(0, 1), st.integers())
@example([], 0.1, 0)
def test_what_a_plan_is(profile: list[tuple[int, int]], keep: float, seed: int) -> None:
    plan = planned(profile, keep_unsolved=keep, seed=seed)
    assert sorted(set(plan.group_size.tolist()) - {0, EVERY_PHASE}) == list(plan.phase_sizes)
    kept = {query for query, phase in enumerate(plan.phase.tolist()) if phase == EVERY_PHASE}
    served = set()
    for phase, size in enumerate(plan.phase_sizes):
        queries = plan.queries(phase).tolist()
        assert queries == sorted(set(queries))
        assert kept <= set(queries)
        own = set(queries) - kept
        assert own
        assert all(plan.phase[query] == phase and plan.group_size[query] == size for query in own)
        assert served.isdisjoint(own)
        served |= own
    for query, (successes, samples) in enumerate(profile):
        assert (query in served) == (successes > 0 and 4 * successes <= 3 * samples)
        if query in served:  # clamp(2^floor(log2(1/p)), 2, 8); the logarithm counts bits, since floats err at the edges
            assert plan.group_size[query] == min(max(2 ** ((samples // successes).bit_length() - 1), 2), 8)
        elif query in kept:
            assert successes == 0
        else:
            assert (plan.group_size[query], plan.phase[query]) == (0, NOT_TRAINED)
    assert (plan.group_size[list(kept)] == EVERY_PHASE).all()


@pytest.mark.parametrize(
    ("share", "unsolved", "kept"),
    [(0.1, 4, 0), (0.1, 5, 1), (0.1, 14, 1), (0.1, 15, 2), (0.1, 25, 3), (0.29, 50, 15), (0, 9, 0), (1, 9, 9)],
)
def test_exactly_the_share_of_unsolved_queries_is_kept(share: float, unsolved: int, kept: int) -> None:
    """Rounded half up. In floats 0.29 * 50 is 14.499999999999998, but the share counts as the decimal written."""
    successes = torch.zeros(2 * unsolved, dtype=torch.int64)
    successes[::2] = 3
    plan = plan_rollouts(successes, 8, keep_unsolved=share)
    assert (plan.phase == EVERY_PHASE).sum() == kept
    assert (plan.phase[::2] == 0).all()


def test_unsolved_queries_are_drawn_by_the_seed() -> None:
    unsolved = torch.zeros(100, dtype=torch.int64)

    def kept(seed: int) -> list[int]:
        return (plan_rollouts(unsolved, 8, seed=seed).phase == EVERY_PHASE).nonzero().flatten().tolist()

    state = torch.get_rng_state()
    assert kept(0) == [2, 25, 29, 35, 40, 76, 82, 86, 90, 99]  # in every release, and on every machine
    assert len({tuple(kept(seed)) for seed in range(20)}) == 20
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_tensors_and_arrays_give_the_same(dtype: torch.dtype) -> None:
    successes = torch.randint(0, 6, (200,)).to(dtype)
    samples = (successes + torch.randint(1, 6, (200,))).to(dtype)
    tensors, arrays = plan_rollouts(successes, samples), plan_rollouts(successes.numpy(), samples.numpy())
    for ours, theirs in [
        (tensors.group_size, arrays.group_size),
        (tensors.phase, arrays.phase),
        *[(tensors.queries(phase), arrays.queries(phase)) for phase in range(len(tensors.phase_sizes))],
    ]:
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, np.ndarray)
        assert (ours.dtype, theirs.dtype) == (torch.int64, np.int64)
        assert ours.tolist() == theirs.tolist()
    assert tensors.phase_sizes == arrays.phase_sizes


def test_one_number_of_samples_or_one_for_each_query() -> None:
    one, *others = (plan_rollouts(torch.arange(9), samples) for samples in (8, torch.full((9,), 8), np.int64(8)))
    assert all(torch.equal(one.group_size, other.group_size) for other in others)


def test_rates_are_compared_exactly() -> None:
    """0.7 counts as seven tenths, which no float represents, and is not above the threshold."""
    for tenths in range(1, 10):
        plan = plan_rollouts(torch.tensor([tenths, tenths + 1]), 10, trivial_above=tenths / 10)
        assert (plan.group_size >= 2).tolist() == [True, False]
    many = 2**53 + 1  # no float64
    plan = plan_rollouts(torch.tensor([2**51, 2**51 + 1]), many)
    assert plan.group_size.tolist() == [4, 2]
    assert math.isclose(2**51 / many, (2**51 + 1) / many)


COUNTS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"successes": [1, 2]}, TypeError, "successes: got list"),
        ({"successes": COUNTS.float()}, TypeError, r"successes: got dtype torch\.float32"),
        ({"successes": COUNTS.bool()}, TypeError, r"successes: got dtype torch\.bool"),
        ({"successes": COUNTS.numpy() / 2}, TypeError, "successes: got dtype float64"),
        ({"successes": COUNTS.unsqueeze(0)}, ValueError, r"successes: got shape \[1, 2\]"),
        ({"successes": torch.tensor(1)}, ValueError, r"successes: got shape \[\]"),
        ({"successes": torch.tensor([1, 9])}, ValueError, "successes: got 9 at query 1; takes 0 to .* 8"),
        ({"successes": torch.tensor([-1, 2])}, ValueError, "successes: got -1 at query 0"),
        ({"samples": 0}, ValueError, "samples: got 0 at query 0; takes at least 1: nothing is known"),
        ({"samples": torch.tensor([8, 0])}, ValueError, "samples: got 0 at query 1"),
        ({"samples": torch.tensor([8])}, ValueError, "samples: got 1 numbers; takes one, or one for each query: 2"),
        ({"samples": np.array([8, 8])}, TypeError, "samples: got ndarray; takes a number, or .* Tensor"),
        ({"samples": 8.0}, TypeError, "samples: got float"),
        ({"samples": True}, TypeError, "samples: got bool"),
        ({"trivial_above": 1.1}, ValueError, r"trivial_above: got 1\.1; takes a number in \[0, 1\]"),
        ({"trivial_above": math.nan}, ValueError, "trivial_above: got nan"),
        ({"keep_unsolved": -0.1}, ValueError, r"keep_unsolved: got -0\.1"),
        ({"keep_unsolved": None}, ValueError, "keep_unsolved: got None"),
        ({"keep_unsolved": "half"}, TypeError, "keep_unsolved: got 'half'"),
        ({"group_sizes": ()}, ValueError, r"group_sizes: got \(\)"),
        ({"group_sizes": (1, 2)}, ValueError, r"group_sizes: got \(1, 2\); takes whole numbers from 2 on"),
        ({"group_sizes": (4, 2)}, ValueError, r"group_sizes: got \(4, 2\)"),
        ({"group_sizes": (2, 2)}, ValueError, r"group_sizes: got \(2, 2\)"),
        ({"group_sizes": (2, 4.0)}, TypeError, r"group_sizes: got 4\.0"),
        ({"rule": "doubling"}, ValueError, "rule: got 'doubling'; takes one of 'buckets', 'inverse_success_rate'"),
        ({"seed": None}, TypeError, "seed: got None"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_rollouts(**{"successes": COUNTS, "samples": 8, **arguments})


@pytest.mark.parametrize(
    ("phase", "error"), [(-1, ValueError), (EVERY_PHASE, ValueError), (2, ValueError), (None, TypeError)]
)
def test_phases_that_are_none(phase: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="phase: got"):
        plan_rollouts(COUNTS, 8).queries(phase)
