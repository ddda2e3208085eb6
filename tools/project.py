"""What the project's files say about the project: version, addresses, requirements, and its description for an index of
packages.

    python tools/project.py test demo      the requirements of these extras, one per line, which `make` installs
    python tools/project.py --version

It provides version and description to scikit-build-core. The version is defined only in CMakeLists.txt.
D3S_LOCAL_VERSION, which tools/wheel.py sets, adds the target of a wheel: cu130 turns 0.2.0 into 0.2.0+cu130. Before
Python 3.11 this needs tomli or pip.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib  # comes with scikit-build-core
    except ImportError:
        from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # scikit-build-core finds only this file
from links import SITE, at_address  # noqa: E402


def project_in(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def address_in(root: Path, of: str = "Repository") -> str:
    """The project's address on a code host, or the address of its documentation; empty if pyproject.toml has none."""
    return str(project_in(root).get("urls", {}).get(of, "")).rstrip("/")


def version_in(root: Path) -> str:
    lists = root / "CMakeLists.txt"
    found = re.search(r"^project\(d3s_kernels VERSION (\S+)", lists.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise ValueError(f"version: {lists} has no project(d3s_kernels VERSION ...)")
    return found[1]


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> str | dict[str, str]:
    """The version, or README.md with the addresses of the project and its site: an index of packages shows README.md on
    a page of its own, where links to files of the repository would lead nowhere.
    """
    if field not in ("version", "readme") or settings:
        raise ValueError(f"{field}: takes version or readme, without settings")
    version, local, page = version_in(ROOT), os.environ.get("D3S_LOCAL_VERSION"), "README.md"
    if field == "version":
        return f"{version}+{local}" if local else version
    text = (ROOT / page).read_text(encoding="utf-8").replace(SITE, address_in(ROOT, "Documentation"))
    return {"content-type": "text/markdown", "text": at_address(text, page, address_in(ROOT), f"v{version}")}


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print(version_in(ROOT))
    else:
        named = project_in(ROOT)["optional-dependencies"]
        print(*sorted({requirement for extra in sys.argv[1:] for requirement in named[extra]}), sep="\n")
