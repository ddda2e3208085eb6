"""The first picture of README.md shows what the library keeps of its batch, and the newest times on a GPU."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import overview
from performance_picture import MOST_BYTES, words_in


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    monkeypatch.setattr(sys, "argv", ["overview.py", "--check"])
    return overview.main


def test_the_front_page_begins_with_it() -> None:
    first = re.search(r"!\[[^]]+\]\(([^)]+)\)", (overview.ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None
    assert overview.ROOT / first[1] == overview.PICTURE


def test_it_is_what_the_newest_run_says(check: Callable[[], int]) -> None:
    assert check() == 0


@pytest.mark.parametrize("contender", overview.CONTENDERS.values())
def test_other_times_are_found(contender: str, check: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = copy.deepcopy(overview.newest()[0])
    run["contests"][overview.FULL_UPDATE][contender]["median_seconds"] += 0.001
    monkeypatch.setattr(overview, "newest", lambda: [(path, run)])
    assert check() == 1


def test_half_of_the_rollouts_and_a_tenth_of_their_tokens_are_kept() -> None:
    shown = overview.shown_of(overview.recorded(), overview.newest()[0][1])
    shares = [part / whole for part, whole in (map(int, count.split(" of ")) for _, count in shown.headings[:2])]
    assert shares == pytest.approx([0.5, 0.1], abs=0.005)  # a part of a token is a whole one
    assert shown.kept[-1][shown.opened]


def test_the_file_keeps_its_words(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from overview_picture import draw

    shown = overview.shown_of(overview.recorded(), overview.newest()[0][1])
    draw(tmp_path / "overview.png", shown)
    assert words_in(tmp_path / "overview.png") == shown.words()
    assert (tmp_path / "overview.png").stat().st_size < MOST_BYTES
