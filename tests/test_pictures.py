"""tools/pictures.py draws every picture, with its words in the file. tests/test_pages.py compares the kept pictures."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import pictures

pytestmark = pytest.mark.slow("that the pictures can be drawn")


@pytest.mark.parametrize("path", pictures.PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_drawn_with_its_words(path: Path, tmp_path: Path) -> None:
    pictures.save(pictures.PICTURES[path](), tmp_path / path.name)
    assert pictures.words_in(tmp_path / path.name) == pictures.words_in(path)
    assert (tmp_path / path.name).stat().st_size < pictures.MOST_BYTES


def test_the_page_of_methods_shows_every_picture_of_its_folder() -> None:
    folder = pictures.ROOT / "docs" / "methods"
    shown = re.findall(r"\]\(methods/([^)]+)\)", folder.with_suffix(".md").read_text(encoding="utf-8"))
    drawn = [path.name for path in pictures.PICTURES if path.parent == folder]
    assert sorted(shown) == sorted(drawn) == sorted(path.name for path in folder.iterdir())
