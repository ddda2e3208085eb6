"""Provides the package's version to scikit-build-core; the version is defined only in CMakeLists.txt.

D3S_LOCAL_VERSION, which tools/wheel.py sets, adds the target of a wheel: cu130 turns 0.1.0 into 0.1.0+cu130.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

LISTS = Path(__file__).resolve().parents[1] / "CMakeLists.txt"


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> str:
    found = re.search(r"^project\(d3s_kernels VERSION (\S+)", LISTS.read_text(encoding="utf-8"), re.MULTILINE)
    if field != "version" or settings or not found:
        raise ValueError(f"{field}: takes version, without settings, from the project(...) of {LISTS}")
    local = os.environ.get("D3S_LOCAL_VERSION")
    return f"{found[1]}+{local}" if local else found[1]
