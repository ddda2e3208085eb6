"""The index of wheels: pip installs from it, and refuses a file that was changed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "wheel_index.py"
NAMES = ("0.2.0+cu128", "0.2.0+cu130", "0.3.0")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Small wheels that only have metadata."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for version in NAMES:
        info = f"d3s_kernels-{version}.dist-info"
        with zipfile.ZipFile(folder / f"d3s_kernels-{version}-py3-none-any.whl", "w") as file:
            metadata = f"Metadata-Version: 2.1\nName: d3s_kernels\nVersion: {version}\nRequires-Python: >=3.10\n"
            file.writestr(f"{info}/METADATA", metadata)
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")
    return folder


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)


def download(index: Path, wanted: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Does what `pip install --no-deps --index-url` does before it unpacks."""
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "download", "--no-deps"]
    command = [*pip, "--no-cache-dir", "--index-url", index.as_uri(), "--dest", out, wanted]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_pip_takes_wheels_from_it(wheels: Path, tmp_path: Path) -> None:
    index = tmp_path / "simple"
    done = make(wheels, index)
    assert done.returncode == 0, done.stderr
    assert "3 wheels" in done.stdout
    for wanted, found in {"d3s-kernels==0.2.0+cu130": NAMES[1], "d3s_kernels": NAMES[2]}.items():
        out = tmp_path / found
        taken = download(index, wanted, out)
        assert taken.returncode == 0, taken.stdout + taken.stderr
        assert [path.name for path in out.iterdir()] == [f"d3s_kernels-{found}-py3-none-any.whl"]
    with (index / "d3s-kernels" / f"d3s_kernels-{NAMES[2]}-py3-none-any.whl").open("ab") as file:
        file.write(b"changed")
    assert "do not match the hashes" in download(index, "d3s-kernels", tmp_path / "changed").stderr.lower()


def test_links_lead_to_the_address(wheels: Path, tmp_path: Path) -> None:
    """The index has the wheels of several releases. Each release has a folder."""
    for name in NAMES:
        folder = wheels / f"v{name.partition('+')[0]}"
        folder.mkdir(exist_ok=True)
        (wheels / f"d3s_kernels-{name}-py3-none-any.whl").rename(folder / f"d3s_kernels-{name}-py3-none-any.whl")
    index = wheels / "simple"
    for _ in range(2):  # an index that exists is replaced
        assert make(wheels, index, "--address", "https://example.invalid/download/").returncode == 0
    page = (index / "d3s-kernels" / "index.html").read_text(encoding="utf-8")
    assert 'href="https://example.invalid/download/v0.2.0/d3s_kernels-0.2.0%2Bcu130-py3-none-any.whl#sha256=' in page
    assert 'href="https://example.invalid/download/v0.3.0/d3s_kernels-0.3.0-py3-none-any.whl#sha256=' in page
    assert page.count('data-requires-python="&gt;=3.10"') == 3
    assert [path.name for path in (index / "d3s-kernels").iterdir()] == ["index.html"]
