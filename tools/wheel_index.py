#!/usr/bin/env python3
"""Make a simple index (PEP 503) of the wheels in a folder, for pip's --index-url or --extra-index-url.

    python tools/wheel_index.py dist simple --address https://…/releases/download

Without --address the wheels are copied into the index, which can then be served, or used as file://…/simple. With
--address, the index has only links: dist/v0.2.0/x.whl is at …/download/v0.2.0/x.whl. `make wheel-index` calls this
script for dist/.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import shutil
import sys
import zipfile
from pathlib import Path
from urllib.parse import quote

PAGE = """<!DOCTYPE html>
<html>
<head><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>
<body>
{links}
</body>
</html>
"""


def page(title: str, links: list[str]) -> str:
    return PAGE.format(title=html.escape(title), links="\n".join(links))


def project_of(wheel: Path) -> str:
    """The project's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def requires_python(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        found = re.search(r"^Requires-Python: (.*)$", file.read(metadata).decode(), re.MULTILINE)
    return found[1] if found else ""


def link(wheel: Path, place: str) -> str:
    """A link with the file's hash, which pip checks. The + of a local version has to be escaped in an address."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    python = html.escape(requires_python(wheel))
    return f'<a href="{place}#sha256={digest}" data-requires-python="{python}">{wheel.name}</a><br>'


def place_of(wheel: Path, folder: Path, address: str | None) -> str:
    return f"{address.rstrip('/')}/{quote(wheel.relative_to(folder).as_posix())}" if address else quote(wheel.name)


def write(wheels: list[Path], folder: Path, out: Path, address: str | None) -> None:
    projects = sorted({project_of(wheel) for wheel in wheels})
    for project in projects:
        own = sorted(wheel for wheel in wheels if project_of(wheel) == project)
        listed = out / project
        listed.mkdir(parents=True, exist_ok=True)
        links = [link(wheel, place_of(wheel, folder, address)) for wheel in own]
        (listed / "index.html").write_text(page(project, links), encoding="utf-8")
        if address is None:
            for wheel in own:
                shutil.copy2(wheel, listed / wheel.name)
    below = [f'<a href="{project}/">{project}</a><br>' for project in projects]
    (out / "index.html").write_text(page("Simple index", below), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder with wheels, or with folders of them")
    parser.add_argument("out", type=Path, help="folder of the index; what is in it is replaced")
    parser.add_argument("--address", help="where the folder can be downloaded; without it wheels are copied")
    given = parser.parse_args()
    of_index = set(given.out.rglob("*.whl")) if given.wheels in given.out.parents else set()
    wheels = sorted(set(given.wheels.rglob("*.whl")) - of_index)
    if not wheels:
        print(f"wheels: {given.wheels} has no .whl file", file=sys.stderr)
        return 1
    if given.out.exists() and any(given.out.iterdir()):
        if not (given.out / "index.html").is_file():
            print(f"out: {given.out} is no index; takes a new folder, or the index of an earlier call", file=sys.stderr)
            return 1
        shutil.rmtree(given.out)
    write(wheels, given.wheels, given.out, given.address)
    print(f"{given.out}: {len(wheels)} wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
