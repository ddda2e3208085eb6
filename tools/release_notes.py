"""Prints the notes of the version in CMakeLists.txt, for the page of its release; `make release-notes` calls it.

Links that lead to files of the repository get the project's address and the tag of the release.
"""

from __future__ import annotations

import re
from pathlib import Path

from links import at_address
from pyproject import address_in
from version import version_in

ROOT = Path(__file__).resolve().parents[1]
NOTES = "docs/release-notes.md"


def notes_of(root: Path, version: str) -> str:
    """The text from the heading of the version up to the next heading; empty if the version has no heading."""
    text = (root / NOTES).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


if __name__ == "__main__":
    version = version_in(ROOT / "CMakeLists.txt")
    print(at_address(notes_of(ROOT, version), NOTES, address_in(ROOT), f"v{version}"))
