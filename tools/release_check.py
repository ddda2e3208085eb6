"""Says what keeps this checkout from being released; `make release-check` calls it.

    python tools/release_check.py                  the version in CMakeLists.txt
    python tools/release_check.py --tag v0.2.0     also checks that this tag is that of the version
    python tools/release_check.py --notes          only prints the notes of this version, for the page of its release

It prints all problems together, one per line; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from links import at_address
from project import address_in, version_in

ROOT = Path(__file__).resolve().parents[1]
NOTES = "docs/release-notes.md"
# Names that no host can have (RFC 2606).
RESERVED = (".invalid", ".example", ".test", ".localhost", "example.com", "example.net", "example.org")
UNPUBLISHED = "No release is published yet"
MEASURED = ("docs/performance.md", "experiments/", "benchmarks/")  # pages of results


def notes_of(root: Path, version: str) -> str:
    """The text from the heading of the version up to the next heading; empty if the version has no heading."""
    text = (root / NOTES).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def addresses_are_placeholders(root: Path) -> Iterator[str]:
    for name in ("Repository", "Documentation"):
        address = address_in(root, name)
        host = urlsplit(address).hostname or ""
        if not host:
            yield f"address: pyproject.toml has {address!r} as {name} in [project.urls]; takes the project's address"
        elif f".{host}".endswith(tuple(f".{reserved.lstrip('.')}" for reserved in RESERVED)):
            yield f"address: {address} in pyproject.toml is a placeholder; takes the project's address"


def pages_deny_it(root: Path) -> Iterator[str]:
    for name in ("README.md", "docs/install.md"):
        if (root / name).exists() and UNPUBLISHED in (root / name).read_text(encoding="utf-8"):
            yield f"pages: {name} says '{UNPUBLISHED}'; a release needs the page without it"


def notes_are_missing(root: Path, version: str) -> Iterator[str]:
    if not notes_of(root, version):
        yield f"notes: {NOTES} has nothing below a heading '## {version}', which is the version in CMakeLists.txt"


def tag_is_of_another_version(version: str, tag: str | None) -> Iterator[str]:
    if tag is not None and tag != f"v{version}":
        yield f"tag: got {tag}; takes v{version}, as CMakeLists.txt has version {version}"


def changes(root: Path) -> Iterator[str]:
    command = ["git", "-C", str(root), "status", "--porcelain"]
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    if said.returncode:
        yield f"working tree: git does not say what has changed: {said.stderr.strip()}"
    for line in said.stdout.splitlines():
        yield f"working tree: {line[3:]} is not committed"


def results_are_missing(root: Path) -> Iterator[str]:
    """Names missing files: the files that README.md names, and the files that are named on pages of results to which
    README.md leads.
    """
    pages = [Path("README.md")]
    for page in pages:
        for name in named(root / page):
            place = (page.parent / name).as_posix()
            if not (root / place).exists():
                yield f"results: {page} names {name}, which does not exist"
            elif place.endswith(".md") and place.startswith(MEASURED) and Path(place) not in pages:
                pages.append(Path(place))


def named(page: Path) -> list[str]:
    """The files that a page links to, and the files of results that it names in inline code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = (target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target)
    in_code = re.findall(r"`((?:[\w.-]+/)*results/[\w./-]+)`", text)
    return sorted({*filter(None, links), *in_code})


def problems(root: Path, tag: str | None) -> list[str]:
    version = version_in(root)
    return [
        *addresses_are_placeholders(root),
        *pages_deny_it(root),
        *notes_are_missing(root, version),
        *tag_is_of_another_version(version, tag),
        *changes(root),
        *results_are_missing(root),
    ]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag of the release")
    parser.add_argument("--notes", action="store_true", help="print the notes; links lead to the address and the tag")
    given, version = parser.parse_args(arguments), version_in(root)
    if given.notes:
        print(at_address(notes_of(root, version), NOTES, address_in(root), f"v{version}"))
        return 0
    wrong = problems(root, given.tag)
    print(*wrong or ["Nothing keeps this version from being released."], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
