"""What set-up needs of a machine is checked before anything is downloaded, and what is missing is named in a line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = ROOT / "tools" / "prerequisites.sh"
SH = shutil.which("sh")

pytestmark = pytest.mark.skipif(SH is None, reason="needs sh")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The folder of programs of a machine that has what set-up needs."""
    answers(tmp_path, "python3", f'exec "{sys.executable}" "$@"')
    answers(tmp_path, "g++", "exit 0")
    return tmp_path


def answers(folder: Path, name: str, code: str) -> None:
    (folder / name).write_text(f"#!{SH}\n{code}\n")
    (folder / name).chmod(0o755)


def lines_of(machine: Path) -> list[str]:
    done = subprocess.run([SH, CHECK, "python3"], env={"PATH": str(machine)}, capture_output=True, text=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert done.returncode == (1 if lines else 0)
    return lines


def test_missing_programs_are_named_all_at_once(machine: Path) -> None:
    assert lines_of(machine) == []
    (machine / "g++").unlink()
    (compiler,) = lines_of(machine)
    assert compiler == (
        "Needs a C++ compiler. Debian, Ubuntu: sudo apt install g++. Fedora: sudo dnf install gcc-c++. "
        "macOS: xcode-select --install."
    )
    (machine / "python3").unlink()
    (python,) = {*lines_of(machine)} - {compiler}
    assert python.startswith("Needs Python 3.10 or newer, and there is no python3. Debian, Ubuntu: sudo apt install")


@pytest.mark.parametrize(
    ("lacking", "line"),
    [
        ("venv", "Needs Python's venv. Debian, Ubuntu: sudo apt install python3-venv."),
        ("Python.h", "Needs Python's headers (Python.h). Debian, Ubuntu: sudo apt install python3-dev."),
    ],
)
def test_a_python_in_parts(machine: Path, lacking: str, line: str) -> None:
    answers(machine, "python3", f'case "$2" in *{lacking}*) exit 1;; esac; exec "{sys.executable}" "$@"')
    (found,) = lines_of(machine)
    assert found.startswith(line)


def test_an_old_python(machine: Path) -> None:
    answers(machine, "python3", 'case "$2" in *platform*) echo 3.9.2;; *) exit 1;; esac')
    assert lines_of(machine) == [
        "Needs Python 3.10 or newer; python3 is 3.9.2. With another one installed: make PYTHON=python3.11 ..."
    ]


def test_the_page_on_installing_names_the_packages() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for package in ("make", "g++", "python3-dev", "python3-venv", "gcc-c++", "python3-devel", "xcode-select --install"):
        assert package in page


def test_a_stage_says_what_it_is_and_how_it_ended(tmp_path: Path) -> None:
    stage = ROOT / "tools" / "stage.sh"
    done, failed = (
        subprocess.run([SH, stage, "a thing", "sh", "-c", f"exit {status}"], capture_output=True, text=True)
        for status in (0, 3)
    )
    assert (done.returncode, done.stdout) == (0, "==> a thing\n    done in 0 s\n")
    assert (failed.returncode, failed.stderr) == (1, "==> a thing: failed\n")
