"""Prints the requirements of the named extras of pyproject.toml, one per line, so that `make` can install them without
building the library again.

python tools/extras.py test demo
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(extras: list[str]) -> None:
    named = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    print(*sorted({requirement for extra in extras for requirement in named[extra]}), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
