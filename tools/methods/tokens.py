"""Draws the tokens that each rule keeps in some sequences of the batch."""

from __future__ import annotations

from pathlib import Path

import torch
from batch import ENTROPY, RATIO, TOKEN_ADVANTAGES, TOKEN_MASK
from grids import Panel, draw_grids

import d3s_kernels as d3s
from d3s_kernels._rules.rules import TOKEN_RULES

NAMES = {
    ("advantage_entropy", "batch"): "D3S: by |A| H",
    ("advantage_entropy", "sequence"): "D3S in sequences: by |A| H",
    ("entropy", "batch"): "80/20: by H",
    ("entropy", "sequence"): "by H",
    ("advantage", "batch"): "by |A|",
    ("advantage", "sequence"): "by |A|: all tie",
    ("random", "batch"): "at random (colour: H)",
    ("random", "sequence"): "S-GRPO: at random (colour: H)",
    ("entropy_quantile", "batch"): "TRL: H at or above a quantile",
    ("prefix", "batch"): "NAT: before a random cut (half; colour: H)",
    ("prefix_advantage_entropy", "batch"): "before a random cut, by |A| H",
}
ROWS = [f"A = {advantage:+.2f}" for advantage in TOKEN_ADVANTAGES.tolist()]


def draw_tokens(path: Path) -> None:
    assert {rule for rule, _ in NAMES} == set(TOKEN_RULES)
    everything = Panel("the tokens, by H: dark is high", ENTROPY, None, shown=TOKEN_MASK, rows=ROWS)
    panels = [of_rule(rule, scope) for rule in TOKEN_RULES for scope in ("batch", "sequence") if (rule, scope) in NAMES]
    draw_grids(path, [*panels, everything], 2, colours="YlOrRd", low=-0.3, high=2.4, height=10.0)


def of_rule(rule: str, scope: str) -> Panel:
    strength = TOKEN_ADVANTAGES.abs().unsqueeze(-1).expand_as(ENTROPY)
    by_both = strength * ENTROPY
    scores = {"advantage_entropy": by_both, "prefix_advantage_entropy": by_both, "advantage": strength}
    draws = rule == "random" or rule.startswith("prefix")
    found = d3s.select_tokens(
        ENTROPY, TOKEN_ADVANTAGES, 0.5 if rule == "prefix" else RATIO, rule=rule, scope=scope, mask=TOKEN_MASK,
        generator=torch.Generator().manual_seed(0) if draws else None,
    )  # fmt: skip
    title = f'"{rule}", scope="{scope}"\n{NAMES[rule, scope]}; {int(found.count.sum())} of {int(TOKEN_MASK.sum())}'
    return Panel(title, scores.get(rule, ENTROPY), found.mask, shown=TOKEN_MASK, rows=ROWS)
