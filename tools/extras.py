"""Prints the requirements of the named extras of pyproject.toml, one per line, so that `make` can install them without
building the library again.

python tools/extras.py test demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyproject import project_in

ROOT = Path(__file__).resolve().parents[1]


def main(extras: list[str]) -> None:
    named = project_in(ROOT)["optional-dependencies"]
    print(*sorted({requirement for extra in extras for requirement in named[extra]}), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
