"""The table [project] of pyproject.toml, for the other tools. Before Python 3.11 it needs tomli or pip.

    python tools/pyproject.py test demo

prints the requirements of these extras, one per line, so that `make` can install them without building the library.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib  # comes with scikit-build-core
    except ImportError:
        from pip._vendor import tomli as tomllib


def project_in(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def address_in(root: Path, of: str = "Repository") -> str:
    """The project's address on a code host, or that of its documentation; empty if pyproject.toml has none."""
    return str(project_in(root).get("urls", {}).get(of, "")).rstrip("/")


def requirements_in(root: Path, extras: list[str]) -> list[str]:
    named = project_in(root)["optional-dependencies"]
    return sorted({requirement for extra in extras for requirement in named[extra]})


if __name__ == "__main__":
    print(*requirements_in(Path(__file__).resolve().parents[1], sys.argv[1:]), sep="\n")
