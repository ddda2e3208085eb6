"""Prints the notes of the version in CMakeLists.txt, for the page of its release; `make release-notes` calls it.

Links that lead to files of the repository get the project's address and the tag of the release.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from pyproject import address_in
from version import version_in

ROOT = Path(__file__).resolve().parents[1]
NOTES = "docs/release-notes.md"


def notes_of(root: Path, version: str) -> str:
    """What stands below the heading of the version, up to the next one; empty if there is no such heading."""
    text = (root / NOTES).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def with_address(text: str, address: str) -> str:
    def link(found: re.Match[str]) -> str:
        if found[1].startswith(("http://", "https://", "#")):
            return found[0]
        return f"]({address}/{posixpath.normpath(posixpath.join(posixpath.dirname(NOTES), found[1]))})"

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


if __name__ == "__main__":
    version = version_in(ROOT / "CMakeLists.txt")
    print(with_address(notes_of(ROOT, version), f"{address_in(ROOT)}/blob/v{version}"))
