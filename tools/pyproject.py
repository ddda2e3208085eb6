"""The table [project] of pyproject.toml, for the other tools. It needs Python 3.11, or a pip beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def project_in(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def address_in(root: Path) -> str:
    """The project's address on a code host, which stands in pyproject.toml alone; empty if it has none."""
    return str(project_in(root).get("urls", {}).get("Repository", "")).rstrip("/")
