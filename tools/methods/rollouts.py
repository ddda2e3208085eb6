"""Draws the rollouts that each rule keeps of the batch, and the advantages before and after the choice."""

from __future__ import annotations

from pathlib import Path

import torch
from batch import ADVANTAGES, KEEP, LENGTHS, REWARDS
from grids import Panel, draw_grids
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels._rules.rules import ROLLOUT_RULES

NAMES = {
    ("max_variance", "batch"): "D3S",
    ("max_variance", "group"): "PODS, D3S-I",
    ("highest", "group"): "PODS max-reward",
    ("largest_abs", "batch"): "CPPO",
    ("largest_abs", "group"): "CPPO",
    ("percentile", "group"): "PODS",
    ("random", "group"): "PODS",
}
ROWS = [f"group {number}" for number in range(1, len(REWARDS) + 1)]
OPTIONS = {"colours": "RdBu", "low": -2.2, "high": 2.2}  # the colours of advantages


def draw_rollouts(path: Path) -> None:
    draw_grids(path, rollout_panels(), 3, height=9.2, **OPTIONS)


def draw_advantages(path: Path) -> None:
    draw_grids(path, advantage_panels(), 3, height=3.6, **OPTIONS)


def rollout_panels() -> list[Panel]:
    """A row of panels for each rule: with scope "batch", with scope "group", and a third with another method."""
    spread = (ADVANTAGES != 0).any(-1, keepdim=True).expand_as(REWARDS)
    success = REWARDS.mean(-1, keepdim=True).expand_as(REWARDS)
    efficiency = REWARDS / LENGTHS
    beside = [
        panel("the batch: its rewards", None, REWARDS),
        panel("GFPO shortest: by length", best(-LENGTHS), LENGTHS, "{:.0f}"),
        panel("GFPO efficiency: by 1000 R / length", best(efficiency), 1000 * efficiency, "{:.1f}"),
        panel("DAPO: groups with some spread", spread, REWARDS),
        panel("difficulty filter: mean R in 0.2 ... 0.8", (success >= 0.2) & (success <= 0.8), REWARDS),
    ]
    panels = []
    for rule, other in zip(ROLLOUT_RULES, beside, strict=True):
        panels += [of_rule(rule, "batch"), of_rule(rule, "group"), other]
    return panels


def advantage_panels() -> list[Panel]:
    kept = d3s.select_rollouts(REWARDS, KEEP, scope="group")
    of_kept = REWARDS.masked_fill(~kept, torch.nan)
    verdict = torch.ones_like(kept)
    verdict[0, 1] = verdict[2, 3] = False
    given = {
        "GRPO": (None, d3s.group_advantages(REWARDS)),
        'Dr. GRPO: scale="none"': (None, d3s.group_advantages(REWARDS, scale="none")),
        'Lite-PPO: scale="batch"': (None, d3s.group_advantages(REWARDS, scale="batch")),
        "PODS: of the kept ones": (kept, d3s.group_advantages(of_kept)),
        "GFPO: the same, ddof=0": (kept, d3s.group_advantages(of_kept, eps=0.0, ddof=0)),
        "ESPO: two without a verdict": (verdict, d3s.group_advantages(REWARDS.masked_fill(~verdict, torch.nan))),
    }
    return [panel(title, shown, found, colour=found) for title, (shown, found) in given.items()]


def of_rule(rule: str, scope: str) -> Panel:
    symbol, values = ("A", ADVANTAGES) if scope == "batch" or rule == "largest_abs" else ("R", REWARDS)
    generator = torch.Generator().manual_seed(0) if rule == "random" else None
    kept = d3s.select_rollouts(values, KEEP, rule=rule, scope=scope, generator=generator)
    by = "at random" if rule == "random" else f"by {symbol}"
    name = NAMES.get((rule, scope))
    return panel(f'"{rule}", scope="{scope}"\n{f"{name}: {by}" if name else by}', kept, values)


def best(values: Tensor) -> Tensor:
    return d3s.select_rollouts(values, KEEP, rule="highest", scope="group")


def panel(title: str, kept: Tensor | None, numbers: Tensor, form: str = "{:.2f}", colour: Tensor = ADVANTAGES) -> Panel:
    text = [[short(form.format(number)) for number in row] for row in numbers.tolist()]
    return Panel(title, colour, kept, text, rows=ROWS)


def short(number: str) -> str:
    """The number without redundant zeros."""
    return number.replace("-0.", "-.").removesuffix(".00").removesuffix(".0").removeprefix("0") or "0"
