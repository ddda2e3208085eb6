"""What set-up needs of a machine is checked before anything is downloaded, and what is missing is named in a line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SH = shutil.which("sh")
pytestmark = pytest.mark.skipif(SH is None, reason="needs sh")
PYTHON = f'exec "{sys.executable}" "$@"'


def lines_of(folder: Path, **programs: str) -> list[str]:
    """What the check says on a machine that has these programs."""
    folder.mkdir()
    for name, code in programs.items():
        (folder / name).write_text(f"#!{SH}\n{code}\n")
        (folder / name).chmod(0o755)
    command = [SH, TOOLS / "prerequisites.sh", "python3"]
    done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == bool(done.stderr)
    return done.stderr.splitlines()


def test_what_is_missing_is_named_all_at_once(tmp_path: Path) -> None:
    compiler = (
        "Needs a C++ compiler. Debian, Ubuntu: sudo apt install g++. Fedora: sudo dnf install gcc-c++. "
        "macOS: xcode-select --install."
    )
    assert lines_of(tmp_path / "all", python3=PYTHON, **{"g++": "exit 0"}) == []
    assert lines_of(tmp_path / "no compiler", python3=PYTHON) == [compiler]
    (python,) = {*lines_of(tmp_path / "nothing")} - {compiler}
    assert python.startswith("Needs Python 3.10 or newer, and there is no python3. Debian, Ubuntu: sudo apt install")
    old = 'case "$2" in *platform*) echo 3.9.2;; *) exit 1;; esac'
    (found,) = lines_of(tmp_path / "old", python3=old, **{"g++": "exit 0"})
    assert found.startswith("Needs Python 3.10 or newer; python3 is 3.9.2. With another one installed: make PYTHON=")
    for part, line in (("venv", "Needs Python's venv. Debian"), ("Python.h", "Needs Python's headers (Python.h). Deb")):
        code = f'case "$2" in *{part}*) exit 1;; esac; {PYTHON}'
        (found,) = lines_of(tmp_path / part, python3=code, **{"g++": "exit 0"})
        assert found.startswith(line)


def test_a_stage_says_what_it_is_and_how_it_ended() -> None:
    done, failed = (
        subprocess.run([SH, TOOLS / "stage.sh", "a thing", "sh", "-c", f"exit {n}"], capture_output=True, text=True)
        for n in (0, 3)
    )
    assert done.returncode == 0
    assert re.fullmatch(r"==> a thing\n    done in \d+ s\n", done.stdout)
    assert (failed.returncode, failed.stderr) == (1, "==> a thing: failed\n")
