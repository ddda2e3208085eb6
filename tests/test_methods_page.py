"""The lines of docs/_methods_rules.md do what the page says beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference

PAGE = (Path(__file__).parents[1] / "docs" / "_methods_rules.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| .*`((?:kept|advantages|groups|tokens) = [^`]+)` \|$", PAGE, re.MULTILINE)
LINES: dict[str, str] = dict(ROWS)

GROUPS, N, KEEP, RATIO = 5, 8, 3, 0.25


def names() -> dict[str, Any]:
    """What the page calls by name. Rewards differ but for those of the first group; so do lengths and entropies."""
    rewards = torch.randn(GROUPS, N)
    rewards[0] = 0.1
    return {
        "torch": torch,
        "d3s": d3s,
        "rewards": rewards,
        "advantages": reference.group_advantages(rewards),
        "lengths": (torch.randperm(GROUPS * N).float() + 1).view(GROUPS, N),
        "kept": reference.max_variance_select(rewards, KEEP),
        "keep": KEEP,
        "n": N,
        "batch": GROUPS * N,
        "p": 0.3,
        "low": 0.2,
        "high": 0.8,
    }


def names_of_tokens() -> dict[str, Any]:
    mask = torch.rand(6, 40) < 0.8
    advantages, entropy = torch.randn(6), torch.where(mask, torch.rand(6, 40), 9.0)
    return {"torch": torch, "d3s": d3s, "entropy": entropy, "mask": mask, "advantages": advantages, "ratio": RATIO}


def run(rule: str, values: dict[str, Any]) -> Any:
    line = LINES[rule]
    exec(line, values)
    return values[line.partition(" = ")[0]]


def highest(values: Tensor, count: int) -> Tensor:
    """Of each row; no two are equal."""
    return values >= values.sort(-1, descending=True).values[..., count - 1 : count]


def pooled(values: Tensor, count: int) -> Tensor:
    return highest(values.flatten(), count).view_as(values)


ROLLOUTS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "max variance, pooled": lambda v: reference.select_rollouts(v["advantages"], KEEP),
    "max variance, in groups": lambda v: reference.max_variance_select(v["rewards"], KEEP),
    "max-reward": lambda v: highest(v["rewards"], KEEP),
    "percentile": lambda v: reference.select_rollouts(v["rewards"], KEEP, rule="percentile", scope="group"),
    "shortest responses": lambda v: highest(-v["lengths"], KEEP),
    "token efficiency": lambda v: highest(v["rewards"] / v["lengths"], KEEP),
    r"pruned by \|A\|, in groups": lambda v: highest(v["advantages"].abs(), N - int(N * 0.3)),
    r"pruned by \|A\|, in the batch": lambda v: pooled(v["advantages"].abs(), GROUPS * N - int(GROUPS * N * 0.3)),
    "advantages of the full group, then the choice": lambda v: reference.select_rollouts(
        reference.group_advantages(v["rewards"]), KEEP
    ),
    "the choice, then advantages of the subset": lambda v: standardised(v, 1, 1e-4),
    "the same, by the population's deviation": lambda v: standardised(v, 0, 0.0),
    "some spread of rewards": lambda v: torch.tensor([len(set(row)) > 1 for row in v["rewards"].tolist()]),
}


def standardised(values: dict[str, Any], ddof: int, eps: float) -> Tensor:
    """Of the kept rewards of each group; 0 for the others, and where the kept ones are equal."""
    result = torch.zeros(GROUPS, N)
    for row, rewards, kept in zip(result, values["rewards"].double(), values["kept"], strict=True):
        scored = rewards[kept]
        if len(set(scored.tolist())) > 1:
            row[kept] = ((scored - scored.mean()) / (scored.std(correction=ddof) + eps)).float()
    return result


@pytest.mark.parametrize("rule", ROLLOUTS)
def test_lines_of_rollouts(rule: str) -> None:
    values = names()
    if rule.startswith(("pruned", "max-reward", "token")):  # without ties
        values["rewards"] = torch.randn(GROUPS, N)
        values["advantages"] = reference.group_advantages(values["rewards"])
    expected = ROLLOUTS[rule](dict(values))
    torch.testing.assert_close(run(rule, values), expected, rtol=1e-5, atol=1e-6)


def test_the_random_line() -> None:
    assert (run("random rollouts", names()).sum(-1) == KEEP).all()


def test_the_band_of_difficulty() -> None:
    """Of 0, 2, ... 10 right ones of ten: both ends of the band are in it."""
    values = names() | {"rewards": (torch.arange(10) < torch.arange(0, 11, 2).unsqueeze(-1)).float()}
    assert run("a band of difficulty", values).tolist() == [False, True, True, True, True, False]


def test_a_mask_of_groups_goes_into_a_rule() -> None:
    values = names()
    groups = run("some spread of rewards", values)
    (given,) = re.findall(r"`(mask=groups[^`]+)`", PAGE)
    kept = eval(f"d3s.select_rollouts(rewards, keep, rule='random', scope='group', {given})", values)
    assert (kept.sum(-1) == KEEP * groups).all()


TOKENS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "advantage x entropy": lambda v: v["advantages"].abs().unsqueeze(-1) * v["entropy"],
    "entropy": lambda v: v["entropy"],
    "quantile of the entropy": lambda v: v["entropy"],  # without ties it keeps as many, give or take the rounding
}


@pytest.mark.parametrize("rule", TOKENS)
def test_lines_of_tokens(rule: str) -> None:
    values = names_of_tokens()
    scores = TOKENS[rule](values).masked_fill(~values["mask"], -1)
    found = run(rule, values)
    n = int(values["mask"].sum())
    assert RATIO * n - 1 <= found.count <= RATIO * n + 1
    torch.testing.assert_close(found.mask, pooled(scores, int(found.count)))


def test_lines_of_tokens_in_sequences() -> None:
    values = names_of_tokens()
    shares = [-(-int(n) // 4) for n in values["mask"].sum(-1)]
    by_entropy = run("entropy, in sequences", values)
    for row, mask, kept, count in zip(values["entropy"], values["mask"], by_entropy.mask, shares, strict=True):
        torch.testing.assert_close(kept, highest(row.masked_fill(~mask, -1), count))
    drawn = run("random tokens", values)
    assert drawn.mask.sum(-1).tolist() == shares
    assert not drawn.mask[~values["mask"]].any()


def test_the_line_of_the_advantage_alone() -> None:
    """The sequences of the largest |A| from their first token on."""
    values = names_of_tokens()
    left = -(-int(values["mask"].sum()) // 4)
    expected = torch.zeros(6, 40, dtype=torch.bool)
    for row in values["advantages"].abs().argsort(descending=True).tolist():
        first = values["mask"][row].nonzero().flatten()[:left]
        expected[row, first] = True
        left -= len(first)
    torch.testing.assert_close(run("advantage", values).mask, expected)


def test_every_line_is_tested_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    tested = {*ROLLOUTS, *TOKENS, *re.findall(r'run\("([^"]+)"', source)}
    assert tested == set(LINES)
    assert len(LINES) == len(re.findall(r"` \|$", PAGE, re.MULTILINE))
