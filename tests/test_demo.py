"""The parts of the demo, on the tiny model that it makes where it has no other; `make demo` runs it on SmolLM2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
pytest.importorskip("trl")
pytest.importorskip("rich")

from _demo.problems import is_right  # noqa: E402


def test_the_verifier_reads_the_last_answer() -> None:
    for text, right in (
        ("4 + 5 = 9, the answer is 9.", True),
        ("the answer is 8. No, the answer is 9", True),
        ("the answer is 9. No, the answer is 8", False),
        ("4 + 5 = 9.", False),
        ("the answer is 90", False),
        ("", False),
    ):
        assert is_right(text, 9) == right, text


def demo(folder: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, EXAMPLES / "demo.py", *options], capture_output=True, text=True, cwd=folder)


@pytest.mark.slow("the whole demo without SmolLM2")
def test_the_demo_without_a_model_says_so_and_runs(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The model is a stand-in" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    row = next(line for line in done.stdout.splitlines() if "answers trained on" in line)
    assert row.split()[-5:] == ["16", "16", "4", "10", "16"]
    page = (tmp_path / "demo" / "selection.html").read_text(encoding="utf-8")
    tokens = next(line for line in done.stdout.splitlines() if "tokens with a gradient" in line)
    assert page.count("<mark class=s") == int(tokens.split()[-2])
    assert not re.search("[<]script", page)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = demo(tmp_path, "--model", tmp_path)
    assert done.returncode == 2
    assert "has no config.json; takes the folder of a saved model" in done.stderr
