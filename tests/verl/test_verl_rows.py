"""Which rows verl keeps: plain functions on tensors, which do not need verl."""

import dataclasses
import doctest
import importlib
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_rows import choose_rows

import d3s_kernels as d3s
from d3s_kernels.integrations.verl import D3SOptions
from d3s_kernels.integrations.verl.rows import rows_of_an_update, sessions
from d3s_kernels.selection import Selection
from d3s_kernels.selection.options import options_from

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def test_verl_need_not_be_there() -> None:
    code = "import sys; sys.modules['verl'] = None; from d3s_kernels.integrations.verl import D3SOptions, rows"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def shuffled_groups(sizes: list[int]) -> list[str]:
    uids = [f"group {group}" for group, size in enumerate(sizes) for _ in range(size)]
    return [uids[i] for i in torch.randperm(len(uids))]


def rows_by_group(groups: list[str]) -> dict[str, list[int]]:
    return {uid: [row for row, other in enumerate(groups) if other == uid] for uid in groups}


def test_examples() -> None:
    module = importlib.import_module("d3s_kernels.integrations.verl.rows")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 1
    assert not results.failed


@given(SIZES, st.integers(1, 9), st.integers(1, 8), st.sampled_from(["batch", "group"]))
def test_rows_of_select_rollouts_are_rounded_up_to_a_multiple(
    sizes: list[int], keep: int, multiple: int, scope: Any
) -> None:
    groups = shuffled_groups(sizes)
    advantages = torch.randn(len(groups))
    by_group = rows_by_group(groups)
    order = torch.tensor([row for rows in by_group.values() for row in rows])
    offsets = torch.tensor([0, *map(len, by_group.values())]).cumsum(0)
    mask = d3s.select_rollouts(advantages[order], keep, offsets=offsets, scope=scope)
    plain = choose_rows(advantages, groups, keep, scope=scope).tolist()
    assert plain == sorted(order[mask].tolist())
    asked = keep * len(sizes) if scope == "batch" else sum(min(keep, size) for size in sizes)
    assert len(plain) == min(asked, len(groups))
    rounded = min(-(-len(plain) // multiple), len(groups) // multiple) * multiple
    if rounded == 0:
        with pytest.raises(ValueError, match=f"multiple_of: got {multiple}, and {len(groups)} rollouts"):
            choose_rows(advantages, groups, keep, scope=scope, multiple_of=multiple)
        return
    found = choose_rows(advantages, groups, keep, scope=scope, multiple_of=multiple).tolist()
    assert len(found) == rounded
    if scope == "batch":
        assert found == d3s.max_variance_select(advantages, rounded).nonzero().flatten().tolist()
    else:  # each group keeps its best subset of some size; tests/test_selection.py says which groups keep more
        for rows in by_group.values():
            own = [row for row in rows if row in found]
            best = d3s.max_variance_select(advantages[rows], max(1, len(own)))
            assert not own or own == torch.tensor(rows)[best].tolist()


def test_groups_without_a_spread_give_their_places_to_others() -> None:
    groups, advantages = list("aaabbbb"), torch.tensor([0.0, 0.0, 0.0, -1.2, 1.2, 0.2, -1.2])
    assert choose_rows(advantages, groups, 2, scope="batch").tolist() == [3, 4, 5, 6]
    assert choose_rows(advantages, groups, 2, scope="group").tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("multiple", [0, -1, 1.5, None])
def test_an_impossible_multiple(multiple: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="multiple_of"):
        choose_rows(torch.randn(4), list("aabb"), 1, multiple_of=multiple)


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


def test_options_have_the_defaults_of_the_paper() -> None:
    options = options_from(D3SOptions, {})
    rules = "max_variance", "batch", "advantage_entropy", "batch"
    assert options == D3SOptions(0.25, 1.0, 0.05, 0.20, "linear", *rules, "kept", False, "all")
    assert Selection(options).budget(0.0, 32) == d3s.Budget(8, 0.05)
    assert Selection(options).budget(0.5, 32) == (20, pytest.approx(0.125))
    assert Selection(options).budget(1.0, 32) == d3s.Budget(32, 0.20)


def test_the_budget_stays_between_two_and_the_group() -> None:
    selection = Selection(D3SOptions(rollouts_start=0.01, rollouts_end=32))
    assert [selection.budget(progress, 16).rollouts for progress in (0.0, 1.0)] == [2, 16]


BAD = {
    "rollouts_start": [0, -1, 2.5, math.inf, math.nan, "8", True],
    "rollouts_end": [0.0, 1.5],
    "token_ratio_start": [0, 1.01, -0.1, math.nan, "0.1", True],
    "token_ratio_end": [0.0, 2],
    "schedule_shape": ["square", 1, None],
    "rollout_rule": ["variance", None],
    "rollout_scope": ["sequence", None],
    "token_rule": ["top", 1],
    "token_scope": ["group", None],
    "loss_denominator": ["some", True],
    "drop_zeros": [1, "yes", None],
    "advantages_from": ["survivors", False],
    "off_policy_rule": ["icepop", None],
    "off_policy_low": [-1, "1", True, math.nan, 0.5],
    "off_policy_high": [-0.5, 2],
    "group_variance_mass": [0, 1.5, "0.5", True],
    "drop_shared_tokens": [1, "yes", None],
    "sampling_mask_field": ["", True],
}


def test_every_option_has_bad_values_here() -> None:
    assert list(BAD) == [field.name for field in dataclasses.fields(D3SOptions)]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_bad_values(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^here\.{key}: got .*; takes ") as error:
        options_from(D3SOptions, {key: value}, "here.")
    assert repr(value) in str(error.value)
