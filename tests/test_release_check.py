"""tools/release_check.py refuses what must not be released, and says all of it at once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from project import version_in
from release_check import NOTES, main, notes_of, problems

ROOT = Path(__file__).parents[1]
FILES = {
    "CMakeLists.txt": "project(d3s_kernels VERSION 1.2.3 LANGUAGES CXX)\n",
    "pyproject.toml": """[project]
name = "d3s_kernels"
[project.urls]
Repository = "https://code.test-host.org/d3s"
Documentation = "https://site.test-host.org/d3s"
""",
    NOTES: "# Release notes\n\n## 1.2.3\n\nNew: [a page](page.md).\n\n## 1.2.2\n\nOlder.\n",
    "README.md": "[results](docs/performance.md#here), [an experiment](experiments/one/README.md), [out](https://x.y/z)\n",
    "docs/performance.md": "[all](../benchmarks/results/machine.md), `benchmarks/targets.py`\n",
    "docs/page.md": "[elsewhere](gone.md)\n",  # no page of results
    "benchmarks/results/machine.md": "Times.\n",
    "experiments/one/README.md": "`results/table.csv`\n",
    "experiments/one/results/table.csv": "1\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that can be released once it is committed."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_all_is_said_at_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run(["git", "-C", root, *settings, *command], check=True, capture_output=True)
    assert problems(root, "v1.2.3") == []
    assert main([], root) == 0
    assert capsys.readouterr().out == "Nothing keeps this version from being released.\n"
    (root / "pyproject.toml").write_text('[project]\nname = "d3s_kernels"\n')
    (root / NOTES).write_text("# Release notes\n")
    (root / "benchmarks/results/machine.md").unlink()
    (root / "README.md").write_text(FILES["README.md"] + "**No release is published yet.**\n")
    (root / "new.txt").write_text("New.\n")
    assert main(["--tag", "v2"], root) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "address", "address", "pages", "notes", "tag", *["working tree"] * 5, "results",
    ]  # fmt: skip
    assert lines[4] == "tag: got v2; takes v1.2.3, as CMakeLists.txt has version 1.2.3"
    assert "working tree: new.txt is not committed" in lines


# ---- of this repository ----------------------------------------------------------------------------------------------


def test_the_page_names_wheels_of_this_version_which_has_notes() -> None:
    text, version = (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), version_in(ROOT)
    assert set(re.findall(r"(?<!torch )\b(\d+\.\d+\.\d+)\+cu", text)) == {version}
    assert notes_of(ROOT, version)
