"""tools/release_check.py refuses what must not be released, and says all of it at once."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import d3s_kernels as d3s
from d3s_kernels import distributed

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from links import at_address  # noqa: E402
from release_check import main, problems  # noqa: E402
from release_notes import NOTES, notes_of  # noqa: E402
from version import version_in  # noqa: E402

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


def git(root: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", root, *settings, *arguments], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that can be released."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "All")


def problems_with(root: Path, name: str, text: str) -> list[str]:
    """What keeps the repository from being released when a file has this text."""
    (root / name).write_text(text)
    commit(root)
    return problems(root, None)


def test_what_can_be_released(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(root, "v1.2.3") == []
    assert main([], root) == 0
    assert capsys.readouterr().out == "Nothing keeps this version from being released.\n"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://example.invalid/d3s", "address: https://example.invalid/d3s in pyproject.toml is a placeholder"),
        ("https://EXAMPLE.com/d3s", "address: https://EXAMPLE.com/d3s in pyproject.toml is a placeholder"),
        ("https://code.example/d3s", "address: https://code.example/d3s in pyproject.toml is a placeholder"),
        ("", "address: pyproject.toml has '' as Repository in [project.urls]; takes the project's address"),
        ("d3s_kernels", "address: pyproject.toml has 'd3s_kernels' as Repository"),
    ],
)
@pytest.mark.parametrize("of", ["code", "site"])
def test_a_placeholder_address_is_refused(root: Path, address: str, said: str, of: str) -> None:
    text = FILES["pyproject.toml"].replace(f"https://{of}.test-host.org/d3s", address)
    (problem,) = problems_with(root, "pyproject.toml", text)
    assert problem.startswith(said.replace("Repository", "Documentation") if of == "site" else said)


@pytest.mark.parametrize("notes", ["# Release notes\n\n## 1.2.30\n\nNew.\n", "## 1.2.3\n\n## 1.2.2\n\nOlder.\n"])
def test_a_version_without_notes_is_refused(root: Path, notes: str) -> None:
    said = f"notes: {NOTES} has nothing below a heading '## 1.2.3', which is the version in CMakeLists.txt"
    assert problems_with(root, NOTES, notes) == [said]


def test_a_tag_of_another_version_is_refused(root: Path) -> None:
    assert problems(root, "v1.2.2") == ["tag: got v1.2.2; takes v1.2.3, as CMakeLists.txt has version 1.2.3"]


def test_changes_are_refused(root: Path) -> None:
    (root / "README.md").write_text("Changed.\n")
    (root / "new.txt").write_text("New.\n")
    assert problems(root, None) == [f"working tree: {name} is not committed" for name in ("README.md", "new.txt")]


def test_what_is_no_repository_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".git").rename(root / "was-git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
    (problem,) = problems(root, None)
    assert problem.startswith("working tree: git does not say what has changed: fatal: not a git repository")


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("docs/performance.md", "results: README.md names docs/performance.md, which does not exist"),
        ("benchmarks/results/machine.md", "results: docs/performance.md names ../benchmarks/results/machine.md, which"),
        ("experiments/one/results/table.csv", "results: experiments/one/README.md names results/table.csv, which does"),
    ],
)
def test_missing_results_are_refused(root: Path, gone: str, said: str) -> None:
    (root / gone).unlink()
    commit(root)
    (problem,) = problems(root, None)
    assert problem.startswith(said)


def test_all_is_said_at_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "pyproject.toml").write_text('[project]\nname = "d3s_kernels"\n')
    (root / NOTES).write_text("# Release notes\n")
    (root / "benchmarks/results/machine.md").unlink()
    assert main(["--tag", "v2"], root) == 1
    begins = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert begins == ["address", "address", "notes", "tag", *["working tree"] * 3, "results"]


def test_a_page_that_denies_the_release_is_refused(root: Path) -> None:
    (problem,) = problems_with(root, "README.md", FILES["README.md"] + "**No release is published yet.**\n")
    assert problem.startswith("pages: README.md says 'No release is published yet'; a release needs the page without")


def test_links_of_the_notes_lead_to_the_release(root: Path) -> None:
    notes = at_address(notes_of(root, "1.2.3"), NOTES, "https://a.b", "v1.2.3")
    assert notes == "New: [a page](https://a.b/blob/v1.2.3/docs/page.md)."
    kept = "[x](https://c.d), [y](#here), [z](../one/README.md), ![p](x.png)\n\n```\na[b](c)\n```\n"
    led = kept.replace("../one", "https://a.b/blob/main/one").replace("x.png", "https://a.b/raw/main/docs/x.png")
    assert at_address(kept, NOTES, "https://a.b", "main") == led


# ---- of this repository ----------------------------------------------------------------------------------------------


def test_this_version_has_notes() -> None:
    assert notes_of(ROOT, version_in(ROOT / "CMakeLists.txt"))


def test_the_page_names_wheels_of_this_version() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<!torch )\b(\d+\.\d+\.\d+)\+cu", text)) == {version_in(ROOT / "CMakeLists.txt")}


def rows(heading: str) -> list[tuple[list[str], list[str], str]]:
    """Of each row of a table in the notes of 0.2.0: the old names, the new names, and the last cell."""
    (table,) = re.findall(rf"^### {heading}\n(.*?)(?=^##|\Z)", notes_of(ROOT, "0.2.0"), re.MULTILINE | re.DOTALL)
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", old), re.findall(r"`([^`]+)`", new), last) for old, new, last in cells]


def test_the_notes_name_arguments_that_are_there() -> None:
    found = 0
    for (old,), (new,), last in rows("Arguments and modules"):
        if not old.endswith("="):
            importlib.import_module(new)
            continue
        functions = set(re.findall(r"`(\w+)`", last))
        functions |= set(distributed.__all__[-2:]) if "shared vocabulary" in last else set()
        for name in functions:
            parameters = inspect.signature(getattr(d3s, name, None) or getattr(distributed, name)).parameters
            assert new.rstrip("=") in parameters, name
            assert old.rstrip("=") not in parameters, name
            found += 1
    assert found == 13


def test_the_notes_name_modules_that_are_there() -> None:
    text = (ROOT / "docs" / "release-notes.md").read_text(encoding="utf-8")
    table = text.partition("### Modules that moved")[2].partition("###")[0]
    cells = re.findall(r"^\| (`.*`) \| (`.*`)[^|]* \|$", table, re.MULTILINE)
    assert len(cells) == 14
    for old, new in (map(re.compile(r"`([\w.]+)`").findall, row) for row in cells):
        assert len(old) == len(new)
        for before, now in zip(old, new, strict=True):
            importlib.import_module(f"d3s_kernels.{now}")
            assert not (ROOT / "d3s_kernels" / f"{before.replace('.', '/')}.py").exists()


def test_the_notes_name_metrics_that_are_there() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for old, new, _ in rows("Metrics"):
        assert all(f"`{name}`" in page for name in new)
        assert not any(f"`{name}`" in page for name in old)


def test_the_notes_name_ops_that_are_there() -> None:
    ops = [(*old, *new) for old, new, last in rows("Ops, and what is called by make") if last == "op"]
    assert len(ops) == 4
    for old, new in ops:
        assert hasattr(torch.ops.d3s_kernels, new)
        assert not hasattr(torch.ops.d3s_kernels, old)
