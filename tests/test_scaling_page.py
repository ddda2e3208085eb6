"""The snippet of docs/scaling.md runs on ranks that differ, and chooses what one process would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from helpers import assert_identical
from ranks import Ranks, world

import d3s_kernels as d3s

ROOT = Path(__file__).parents[1]
ROLLOUTS, TOKENS = 4, 30


def snippets() -> list[str]:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run(ranks: Ranks | None, groups: list[int]) -> list[dict[str, Any]]:
    """The names of each snippet after it has run, on one of the ranks or in one process that has everything."""
    generator = torch.Generator().manual_seed(sum(groups))
    total = sum(groups)
    advantages = torch.randn(total, ROLLOUTS, generator=generator)
    entropy = torch.rand(total, ROLLOUTS, TOKENS, generator=generator)
    mask = torch.rand(total, ROLLOUTS, TOKENS, generator=generator) < 0.8
    if ranks is not None:
        advantages, entropy, mask = (values.split(groups)[ranks.rank] for values in (advantages, entropy, mask))
    found = []
    for snippet in snippets():
        names: dict[str, Any] = {
            "d3s": d3s, "torch": torch, "advantages": advantages, "entropy": entropy, "mask": mask,
            "per_token_loss": entropy,
            "keep": 2, "budget": d3s.Budget(2, 0.2), "group": None if ranks is None else ranks.group,
        }  # fmt: skip
        exec(snippet, names)
        found.append({"kept": names["kept"], "tokens": names["chosen"], "loss": names["loss"]})
    return found


def test_the_snippets_choose_what_one_process_would() -> None:
    groups = [3, 0, 5]
    alone = run(None, groups)
    assert len(alone) == 1
    of_ranks = world(3).run(run, groups)
    for number, whole in enumerate(alone):
        parts = [found[number] for found in of_ranks]
        assert_identical(torch.cat([part["kept"] for part in parts]), whole["kept"])
        assert int(whole["kept"].sum()) == 2 * sum(groups)
        assert_identical(torch.cat([part["tokens"].mask for part in parts]), whole["tokens"].mask)
        torch.testing.assert_close(sum(part["loss"] for part in parts), whole["loss"])
