"""Provides the package's description to scikit-build-core: README.md, with the addresses of the project and its site.

An index of packages shows the description on a page of its own, where links to files of the repository would lead
nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))  # scikit-build-core finds only this file

from links import SITE, at_address  # noqa: E402
from pyproject import address_in  # noqa: E402
from version import version_in  # noqa: E402

PAGE = "README.md"


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> dict[str, str]:
    if field != "readme" or settings:
        raise ValueError(f"{field}: takes readme, without settings")
    root = TOOLS.parent
    text = (root / PAGE).read_text(encoding="utf-8").replace(SITE, address_in(root, "Documentation"))
    tag = f"v{version_in(root / 'CMakeLists.txt')}"
    return {"content-type": "text/markdown", "text": at_address(text, PAGE, address_in(root), tag)}
