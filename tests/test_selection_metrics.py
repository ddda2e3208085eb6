"""What selection_metrics says of a selection, against plain loops; groups whose rewards differ by rounding alone."""

from __future__ import annotations

import math
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import d3s_kernels as d3s
from d3s_kernels import groups_without_spread
from d3s_kernels.selection.metrics import ASYNC_NAMES, NAMES, PADDING_NAMES, SAMPLING_NAMES, selection_metrics

GROUPS, SIZE, WIDTH = 3, 4, 7
BUDGET = d3s.Budget(2, 0.3)


def selection(scope: Any = "batch") -> dict[str, Any]:
    """The arguments of selection_metrics; the second group has no spread."""
    rewards = torch.rand(GROUPS, SIZE)
    rewards[1] = 0.35
    advantages = d3s.group_advantages(rewards)
    kept = d3s.select_rollouts(advantages, BUDGET.rollouts)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (GROUPS * SIZE, 1))
    rows = kept.flatten()
    entropy = torch.rand(int(kept.sum()), WIDTH)
    tokens = d3s.select_tokens(entropy, advantages[kept], BUDGET.token_ratio, mask=mask[rows], scope=scope)
    given = {"advantages": advantages, "rollout_mask": kept, "tokens": tokens, "token_mask": mask}
    return given | {"head_share": 0.3, "rewards": rewards, "budget": BUDGET}


def by_hand(given: dict[str, Any]) -> dict[str, float]:
    rows = given["rollout_mask"].flatten().nonzero()[:, 0].tolist()
    advantages, lengths = given["advantages"].flatten().tolist(), given["token_mask"].sum(1).tolist()
    kept, positive, of_kept, of_dropped = 0, 0, [], []
    for place, row in enumerate(rows):
        for column in range(lengths[row]):
            is_kept, entropy = (float(part[place, column]) for part in (given["tokens"].mask, given["tokens"].entropy))
            (of_kept if is_kept else of_dropped).append(entropy)
            kept += is_kept
            positive += is_kept and advantages[row] > 0
    everything, forwarded = sum(lengths), sum(lengths[row] for row in rows)
    products = 3 * 0.7 * forwarded + 0.3 * (forwarded + 3 * kept), everything * (3 * 0.7 + 4 * 0.3)
    threshold = given["tokens"].threshold
    return {
        "d3s/rollouts_kept": len(rows),
        "d3s/rollout_share": len(rows) / (GROUPS * SIZE),
        "d3s/rollout_share_asked": 0.5,
        "d3s/groups_without_spread": 1 / 3,
        "d3s/groups_kept": len({row // SIZE for row in rows}) / GROUPS,
        "d3s/tokens_not_forwarded": everything - forwarded,
        "d3s/tokens_kept": kept,
        "d3s/token_share": kept / forwarded,
        "d3s/token_share_asked": 0.3,
        "d3s/threshold": float(threshold[threshold.isfinite()].mean()),
        "d3s/entropy_kept": sum(of_kept) / len(of_kept),
        "d3s/entropy_dropped": sum(of_dropped) / len(of_dropped),
        "d3s/positive_advantage_share": positive / kept,
        "d3s/head_rows_not_computed": forwarded - kept,
        "d3s/flops_saved": 1 - products[0] / products[1],
    }


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_the_numbers(scope: str) -> None:
    given = selection(scope)
    found = selection_metrics(**given)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in found.values())
    assert {name: float(value) for name, value in found.items()} == pytest.approx(by_hand(given))
    assert found.keys() == NAMES.keys()

    # Tokens of all rollouts, of which dropped ones have none, give the same.
    rows = given["rollout_mask"].flatten()
    everywhere = {"mask": torch.zeros(GROUPS * SIZE, WIDTH, dtype=torch.bool), "entropy": torch.rand(12, WIDTH)}
    for name, value in everywhere.items():
        value[rows] = getattr(given["tokens"], name)
    again = selection_metrics(**given | {"tokens": given["tokens"]._replace(**everywhere)})
    assert {name: float(value) for name, value in again.items()} == pytest.approx(by_hand(given))


def test_what_was_not_given_is_left_out() -> None:
    given = selection()
    for name in ("head_share", "rewards", "budget"):
        del given[name]
    left_out = {"d3s/flops_saved", "d3s/rollout_share_asked", "d3s/token_share_asked"}
    found = selection_metrics(**given)
    assert found.keys() == NAMES.keys() - left_out
    assert found["d3s/groups_without_spread"] == 1 / 3  # by the advantages


def test_nothing_kept_is_nan_and_raises_nothing() -> None:
    given = selection()
    given["tokens"] = d3s.select_tokens(given["tokens"].entropy, torch.tensor(0.0), 0.5, drop_zeros=True)
    found = selection_metrics(**given)
    for name in ("entropy_kept", "threshold", "positive_advantage_share"):
        assert found[f"d3s/{name}"].isnan()
    assert found["d3s/tokens_kept"] == 0


def test_nothing_waits_for_the_device() -> None:
    """A fake tensor has no values, so that reading one raises."""
    given = selection()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) for name, value in given.items() if isinstance(value, Tensor)}
        tokens = d3s.TokenSelection(*map(mode.from_tensor, given["tokens"][:4]))
        selection_metrics(**given | fakes | {"tokens": tokens})
        with pytest.raises(Exception, match=r"aten\._local_scalar_dense"):
            bool(fakes["rewards"].sum() > 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"advantages": torch.zeros(12)}, r"advantages: got shape \[12\]; takes \[groups, n\]"),
        (
            {"rollout_mask": torch.ones(12).bool()},
            r"rollout_mask: got shape \[12\]; takes that of advantages, \[3, 4\]",
        ),
        ({"token_mask": torch.ones(6, 7).bool()}, r"token_mask: got shape \[6, 7\]; takes \[12, T\], all rollouts"),
        ({"token_mask": torch.ones(12, 8).bool()}, r"tokens: got a mask of shape \[6, 7\]; takes \[kept rollouts, 8\]"),
        ({"rewards": torch.zeros(4, 3)}, r"rewards: got shape \[4, 3\]; takes that of advantages, \[3, 4\]"),
        ({"head_share": 28}, r"head_share: got 28; takes a number in \[0, 1\]"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection_metrics(**selection() | changed)


def test_rewards_that_differ_by_rounding_alone_have_no_spread() -> None:
    """The same three rewards are added in every order, at every size, as several reward functions are."""
    parts = [torch.tensor(part) for part in (0.1, 0.2, 0.35)]
    sums = torch.stack([a + b + c for a, b, c in permutations(parts)])
    for size in (1e-3, 1.0, 1e3, 1e6):
        rewards = (sums * size).expand(2, -1).clone()
        rewards[1, 0] += max(1.0, size) * 1e-4  # a difference that is meant
        assert sums.std() > 0
        assert groups_without_spread(rewards).tolist() == [True, False]
    # Even equal numbers may have a deviation above 0, so that a threshold on the deviation would not do.
    assert groups_without_spread(torch.full((5, 7), 0.35)).all()


def test_the_tolerance_is_what_it_says() -> None:
    edge = torch.tensor([[0.0, 1e-6], [0.0, 2e-6], [10.0, 10.0 + 9e-6], [10.0, 10.0 + 2e-5]])
    assert groups_without_spread(edge).tolist() == [True, False, True, False]
    assert groups_without_spread(edge, tolerance=0).tolist() == [False] * 4
    assert groups_without_spread(edge, tolerance=0.1).all()
    for dtype, step in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):  # one step is rounding; two are not
        rewards = torch.tensor([[1.0, 1.0 + step], [1.0, 1.0 + 2 * step]], dtype=dtype)
        assert groups_without_spread(rewards).tolist() == [True, False]
    for bad in (-1e-9, math.nan):
        with pytest.raises(ValueError, match=r"tolerance: got .*; takes at least 0"):
            groups_without_spread(edge, tolerance=bad)
    with pytest.raises(ValueError, match="offsets"):
        groups_without_spread(edge.flatten(), offsets=torch.tensor([8, 0]))


def test_the_page_has_the_same_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    tables = dict(re.findall(r"^\| `(d3s/\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert tables == NAMES | PADDING_NAMES | SAMPLING_NAMES | ASYNC_NAMES
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0], names)
    assert names["metrics"].keys() == NAMES.keys()
