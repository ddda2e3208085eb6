"""PlanSampler: the phases of a plan in order, and a restart that continues where it stopped."""

import gc
from collections import Counter
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from d3s_kernels import PlanSampler, RolloutPlan, plan_rollouts

SUCCESSES = [3, 0, 2, 8, 1, 4, 0, 2, 5, 1, 0]
PLAN = plan_rollouts(torch.tensor(SUCCESSES), 8, keep_unsolved=0.5)  # 3 of size 2, 2 of 4, 2 of 8; 2 unsolved in each
QUERIES = [set(PLAN.queries(phase).tolist()) for phase in range(3)]

plans = st.lists(st.integers(0, 8), min_size=1, max_size=12).map(
    lambda successes: plan_rollouts(torch.tensor([4, *successes]), 8, keep_unsolved=0.5)
)

ROWS: Any = range(len(SUCCESSES))  # a dataset in which each row is its index


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """The state after a round trip through a file, as in a checkpoint. It holds only plain values."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(plans, st.integers(1, 3), st.booleans(), st.integers())
def test_every_query_is_served_in_every_epoch(plan: RolloutPlan[Any], epochs: int, repeat: bool, seed: int) -> None:
    sampler = PlanSampler(plan, epochs=epochs, repeat=repeat, seed=seed)
    rows = list(sampler)
    assert len(rows) == len(sampler)
    for phase, size in enumerate(plan.phase_sizes):
        queries, repeats = plan.queries(phase).tolist(), size if repeat else 1
        for _ in range(epochs):
            epoch, rows = rows[: len(queries) * repeats], rows[len(queries) * repeats :]
            assert sorted(epoch[::repeats]) == queries
            assert epoch == [query for query in epoch[::repeats] for _ in range(repeats)]
    assert rows == []


def test_the_order_depends_on_seed_phase_and_epoch() -> None:
    plan = plan_rollouts(torch.tensor([4] * 30 + [2] * 30), 8)

    def orders(seed: int) -> list[tuple[int, ...]]:
        rows = list(PlanSampler(plan, epochs=2, seed=seed))
        return [tuple(query % 30 for query in rows[start : start + 30]) for start in range(0, 120, 30)]

    state = torch.get_rng_state()
    assert orders(0) == orders(0)
    assert len({*orders(0), *orders(1)}) == 8
    assert torch.equal(torch.get_rng_state(), state)


def test_phases_come_in_order_and_queries_in_the_same_order_in_every_release() -> None:
    rows = list(PlanSampler(PLAN, seed=7))
    assert rows == [0, 8, 10, 5, 6, 7, 6, 10, 2, 6, 10, 4, 9]
    assert [set(rows[:5]), set(rows[5:9]), set(rows[9:])] == QUERIES
    rows = list(PlanSampler(PLAN, epochs=(1, 3, 2)))
    assert [Counter(part) for part in (rows[:5], rows[5:17], rows[17:])] == [
        dict.fromkeys(queries, epochs) for queries, epochs in zip(QUERIES, (1, 3, 2), strict=True)
    ]


def test_arrays_and_tensors_are_served_alike() -> None:
    arrays = plan_rollouts(np.array(SUCCESSES), 8, keep_unsolved=0.5)
    assert list(PlanSampler(arrays, epochs=2)) == list(PlanSampler(PLAN, epochs=2))
    assert PlanSampler(arrays).state_dict() == PlanSampler(PLAN).state_dict()


# ---- batches ---------------------------------------------------------------------------------------------------------


@given(plans, st.integers(1, 3), st.booleans(), st.integers(1, 3))
def test_batches_lie_in_one_phase_and_nothing_is_lost(
    plan: RolloutPlan[Any], epochs: int, repeat: bool, multiple: int
) -> None:
    batch = multiple * 8 if repeat else multiple
    sampler = PlanSampler(plan, epochs=epochs, repeat=repeat, batch_size=batch)
    batches = list(DataLoader(range(20), batch_size=batch, sampler=sampler, drop_last=True, collate_fn=list))
    assert sum(map(len, batches)) == len(sampler)
    for phase, size in enumerate(plan.phase_sizes):
        repeats = size if repeat else 1
        queries = set(plan.queries(phase).tolist())
        of_phase = -(-epochs * len(queries) * repeats // batch)
        served, batches = batches[:of_phase], batches[of_phase:]
        times = Counter(query for rows in served for query in rows)
        assert set(times) == queries
        assert min(times.values()) >= epochs * repeats
        assert max(times.values()) - min(times.values()) <= -(-batch // len(queries)) * repeats
        assert sum(times.values()) - epochs * len(queries) * repeats < batch
        groups = [rows[start : start + repeats] for rows in served for start in range(0, batch, repeats)]
        assert all(len(set(group)) == 1 for group in groups)
    assert batches == []


# ---- a restart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 4, "epochs": (1, 2, 1)}, {"repeat": True, "batch_size": 16}],
)
def test_a_restart_goes_on_from_every_position(options: dict[str, Any]) -> None:
    whole, running = list(PlanSampler(PLAN, seed=3, **options)), PlanSampler(PLAN, seed=3, **options)
    rows = iter(running)
    for position in range(len(whole) + 1):
        restarted = PlanSampler(PLAN, seed=3, **options)
        restarted.load_state_dict(saved_and_loaded(running.state_dict()))
        assert restarted.state_dict() == running.state_dict()
        assert list(restarted) == whole[position:]
        assert next(rows, None) == (whole[position] if position < len(whole) else None)


def test_a_state_counts_for_one_pass_and_not_for_one_that_is_not_used() -> None:
    whole, sampler = list(PlanSampler(PLAN)), PlanSampler(PLAN)
    sampler.load_state_dict(sampler.state_dict(consumed=4))
    iter(sampler)
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole


def test_a_pass_that_was_broken_off_begins_again() -> None:
    sampler = PlanSampler(PLAN)
    rows = iter(sampler)
    first = [next(rows), next(rows)]
    assert list(sampler)[:2] == first


def test_a_state_of_another_sampler_is_refused() -> None:
    def refused(name: str, plan: RolloutPlan[Any] = PLAN, **options: Any) -> None:
        with pytest.raises(ValueError, match=f"state_dict: was saved with {name} "):
            PlanSampler(PLAN).load_state_dict(PlanSampler(plan, **options).state_dict())

    refused("seed", seed=1)
    refused("epochs", epochs=2)
    refused("repeat", repeat=True)
    refused("batch_size", batch_size=2)
    for option in ({"seed": 1}, {"group_sizes": (2, 4, 7)}):
        refused("plan", plan_rollouts(torch.tensor(SUCCESSES), 8, keep_unsolved=0.5, **option))


@pytest.mark.parametrize("position", [-1, 14, 2.0, None, True])
def test_a_state_beyond_the_pass_is_refused(position: Any) -> None:
    sampler = PlanSampler(PLAN)
    with pytest.raises(ValueError, match=f"state_dict: got position {position}; takes 0 to 13"):
        sampler.load_state_dict({**sampler.state_dict(), "position": position})


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="state_dict: lacks batch_size, epochs, plan, repeat, seed"):
        PlanSampler(PLAN).load_state_dict({"position": 3})
    with pytest.raises(TypeError, match="state_dict: got list"):
        PlanSampler(PLAN).load_state_dict([])  # type: ignore[arg-type]


# ---- the position in a pass ------------------------------------------------------------------------------------------


def test_the_trainer_can_read_phase_and_group_size() -> None:
    sampler = PlanSampler(PLAN, repeat=True)
    assert (sampler.phase, sampler.group_size) == (0, 2)
    assert sampler.starts == (0, 10, 26)
    for row, query in enumerate(sampler):
        assert sampler.phase == sampler.phase_at(row)
        assert sampler.group_size == PLAN.phase_sizes[sampler.phase]
        assert query in QUERIES[sampler.phase]
    assert (sampler.phase, sampler.group_size) == (2, 8)


def test_the_pass_is_not_copied_into_memory() -> None:
    sampler = PlanSampler(PLAN, epochs=10**12)
    assert len(sampler) == 13 * 10**12
    sampler.load_state_dict(sampler.state_dict(consumed=len(sampler) - 2))
    assert len(list(iter(sampler))) == 2  # list(sampler) would reserve memory for the whole pass


# ---- real loaders ----------------------------------------------------------------------------------------------------


def test_a_loader_that_draws_ahead_says_what_it_consumed() -> None:
    sampler = PlanSampler(PLAN, epochs=5)
    whole = list(sampler)
    loader = DataLoader(ROWS, batch_size=2, sampler=sampler, num_workers=2, prefetch_factor=2)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    assert sampler.state_dict()["position"] == 6 + 2 * 2 * 2  # 4 batches are prefetched
    state = sampler.state_dict(consumed=6)
    del batches
    gc.collect()

    restarted = PlanSampler(PLAN, epochs=5)
    restarted.load_state_dict(saved_and_loaded(state))
    rest = DataLoader(ROWS, batch_size=2, sampler=restarted, num_workers=2)
    assert list(chain(*seen, *rest)) == whole


@pytest.mark.parametrize(("stop", "workers"), [(0, 0), (4, 2), (13, 0)])
def test_stateful_data_loader_goes_on_where_the_trainer_was(workers: int, stop: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        sampler = PlanSampler(PLAN, batch_size=2, epochs=2, seed=5)
        return stateful.StatefulDataLoader(ROWS, batch_size=2, sampler=sampler, num_workers=workers)

    def batches_of(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    whole = batches_of(loader())
    assert len(whole) == 13
    running = loader()
    rows = iter(running)
    seen = [next(rows).tolist() for _ in range(stop)]
    state = saved_and_loaded(running.state_dict())
    restarted = loader()
    restarted.load_state_dict(state)
    assert seen + batches_of(restarted) == whole
    assert batches_of(restarted) == whole  # the next pass


# ---- bad arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"plan": [1]}, TypeError, "plan: got list; takes what plan_rollouts returns"),
        ({"plan": plan_rollouts(torch.tensor([0, 8]), 8, keep_unsolved=1)}, ValueError, "plan: has no phase"),
        ({"epochs": 0}, ValueError, "epochs: got 0; takes at least 1"),
        ({"epochs": (1, 1)}, ValueError, "epochs: got 2 numbers; takes one, or one for each of the 3 phases"),
        ({"epochs": 1.5}, TypeError, r"epochs: got 1\.5"),
        ({"seed": None}, TypeError, "seed: got None"),
        ({"repeat": 1}, TypeError, "repeat: got 1; takes True or False"),
        ({"batch_size": 0}, ValueError, "batch_size: got 0; takes at least 1"),
        ({"batch_size": 12, "repeat": True}, ValueError, "batch_size: got 12; takes a multiple of the group size 8"),
        ({"batch_size": 2.0}, TypeError, r"batch_size: got 2\.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PlanSampler(**{"plan": PLAN, **arguments})


@pytest.mark.parametrize("row", [-1, 13])
def test_rows_and_counts_outside_the_pass(row: int) -> None:
    with pytest.raises(ValueError, match=f"row: got {row}; takes 0 to 12"):
        PlanSampler(PLAN).phase_at(row)
    with pytest.raises(ValueError, match=f"consumed: got {2 * row}; takes 0 to 13"):
        PlanSampler(PLAN).state_dict(consumed=2 * row)
