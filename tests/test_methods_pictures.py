"""The pictures of docs/methods.md are those that tools/methods/draw.py draws."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "methods"
pytestmark = pytest.mark.slow("that the pictures are what the library draws today")

SHOWN = re.findall(r"\]\(methods/([^)]+)\)", PICTURES.with_suffix(".md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    subprocess.run([sys.executable, ROOT / "tools" / "methods" / "draw.py", "--out", folder], check=True)
    return folder


def test_the_page_shows_every_picture(drawn: Path) -> None:
    assert sorted(SHOWN) == sorted(path.name for path in drawn.iterdir())
    assert sorted(SHOWN) == sorted(path.name for path in PICTURES.iterdir())


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_says_what_the_library_does(name: str, drawn: Path) -> None:
    """Compares the words in the file, because pixels change with matplotlib's releases."""
    kept, anew = Image.open(PICTURES / name), Image.open(drawn / name)
    assert kept.info["Description"] == anew.info["Description"], "draw it anew: python tools/methods/draw.py"
    assert (PICTURES / name).stat().st_size < 100_000
