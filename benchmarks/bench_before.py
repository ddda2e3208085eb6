"""Ops beside the same ops of an earlier commit, whose package is in the folder that D3S_BEFORE names."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import inputs
from .apart import ROOT, Apart, ClockApart
from .harness import Contest

FOLDER = Path(os.environ.get("D3S_BEFORE", "nowhere"))
OPS = [
    *("narrow_gradient", "few_gradients", "head_both_ways", "importance_ratio_six_groups", "importance_ratio_groups"),
    *("importance_ratio", "adaptive_clip"),
]


@pytest.fixture(scope="module")
def versions(request: pytest.FixtureRequest) -> Iterator[dict[str, Apart]]:
    of = inputs.contests_of, inputs.device.type, request.config.getoption("--short")
    commit = (FOLDER / "commit").read_text().strip()
    with Apart(ROOT, *of) as now, Apart(FOLDER, *of) as before:
        yield {"now": now, commit: before}


@pytest.mark.skipif(not FOLDER.exists(), reason="D3S_BEFORE names no folder")
@pytest.mark.parametrize("op", OPS)
def test_before(contest: Contest, versions: dict[str, Apart], op: str) -> None:
    for version in versions.values():
        version.ask("op", op)
    contest.clock = ClockApart()
    (_, now), (commit, before) = versions.items()
    contest(f"{op}, beside {commit}", "as in one_call.py", now, yardsticks={commit: before}, with_range=True)
