"""Provides the package's version to scikit-build-core; the version is defined only in CMakeLists.txt.

D3S_LOCAL_VERSION, which tools/wheel.py sets, adds the target of a wheel: cu130 turns 0.2.0 into 0.2.0+cu130.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

LISTS = Path(__file__).resolve().parents[1] / "CMakeLists.txt"


def version_in(lists: Path) -> str:
    found = re.search(r"^project\(d3s_kernels VERSION (\S+)", lists.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise ValueError(f"version: {lists} has no project(d3s_kernels VERSION ...)")
    return found[1]


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> str:
    if field != "version" or settings:
        raise ValueError(f"{field}: takes version, without settings")
    local = os.environ.get("D3S_LOCAL_VERSION")
    version = version_in(LISTS)
    return f"{version}+{local}" if local else version


if __name__ == "__main__":
    print(version_in(LISTS))
