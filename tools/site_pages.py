"""Collects the pages of the site for Sphinx; `make docs` calls it.

    python tools/site_pages.py build/pages

The pages are written for a code host, where a link may lead to any file of the repository. In the copies made here, a
link leads to a page of the site if its target is on the site, and otherwise to the file at the project's address. Every
page that another page links to is on the site. The navigation is read from the tables of docs/index.md. Where a page
of the API says ``.. functions:: d3s_kernels.logprobs.logprob_entropy``, the copy describes each public
function of this module.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from links import SITE, is_external, links, with_links
from project import address_in

ROOT = Path(__file__).resolve().parents[1]
START, CONTENTS = PurePosixPath("README.md"), PurePosixPath("docs/index.md")
API = PurePosixPath("docs/site/api")
API_PAGES = (
    "selection", "rollouts", "tokens", "trusted_tokens", "logprobs", "sampling_masks", "ratios", "schedule",
    "micro_batches", "planning", "distributed", "checks", "metrics", "trl", "verl",
)  # fmt: skip

Places = dict[PurePosixPath, PurePosixPath]
"""For each file of the repository, its path on the site."""


def main(folder: Path) -> None:
    places, address, site = all_places(), address_in(ROOT), address_in(ROOT, "Documentation")
    menus = all_menus(places, address)
    for file, place in places.items():
        out = folder / place
        out.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".rst":
            out.write_text(with_functions(read(file)), encoding="utf-8")
            continue
        if file.suffix != ".md":
            shutil.copyfile(ROOT / file, out)
            continue
        text = read(file).replace(SITE, site)
        text = with_links(text, lambda target, file=file: on_site(target, file, places, address))
        out.write_text("\n".join([text, *map(as_toctree, menus.get(file, []))]), encoding="utf-8")


def read(file: PurePosixPath) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


# ---- which files are on the site, and where --------------------------------------------------------------------------


def all_places() -> Places:
    """Every page that can be reached from the start page, with its pictures, and the pages of the API."""
    found: Places = {}
    waiting = [START]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = place_of(file)
        if file.suffix == ".md":
            targets = [resolved(target, file) for target in links(read(file)) if not is_external(target)]
            waiting += [target for target in targets if target.suffix in (".md", ".png")]
    return found | {API / f"{name}.rst": PurePosixPath("api", f"{name}.rst") for name in API_PAGES}


def place_of(file: PurePosixPath) -> PurePosixPath:
    if file == CONTENTS:
        return PurePosixPath("pages.md")
    if file.name == "README.md":
        return file.with_name("index.md")
    return file.relative_to("docs") if file.is_relative_to("docs") else file


# ---- functions of a module -------------------------------------------------------------------------------------------


def with_functions(page: str) -> str:
    """The page of the API. A line that names a module is replaced by the functions of the module."""
    return re.sub(
        r"^\.\. functions:: d3s_kernels\.([\w.]+)$", lambda line: functions_of(line[1]), page, flags=re.MULTILINE
    )


def functions_of(module: str) -> str:
    """What d3s_kernels imports from the module, in the module's order. It is read from the sources, without torch."""
    package = PurePosixPath("d3s_kernels")
    imports = [node for node in ast.parse(read(package / "__init__.py")).body if isinstance(node, ast.ImportFrom)]
    public = {alias.name for node in imports if node.module == module for alias in node.names}
    defined = re.findall(r"^def (\w+)\(", read(package / f"{module.replace('.', '/')}.py"), re.MULTILINE)
    return "\n\n".join(f".. autoapifunction:: d3s_kernels.{name}" for name in defined if name in public)


# ---- links -----------------------------------------------------------------------------------------------------------


def resolved(target: str, file: PurePosixPath) -> PurePosixPath:
    """The file of the repository to which a link on the page ``file`` leads."""
    name = target.partition("#")[0]
    found = PurePosixPath(os.path.normpath(file.parent / name)) if name else file
    if not (ROOT / found).exists():
        raise SystemExit(f"{file}: links to {target}, which is not there")
    return found


def on_site(target: str, file: PurePosixPath, places: Places, address: str) -> str:
    """The site's replacement for the link ``target`` on the page ``file``."""
    if is_external(target) or target.startswith("#"):
        return target
    found = resolved(target, file)
    anchor = target[target.index("#") :] if "#" in target else ""
    if found in places:
        return os.path.relpath(places[found], places[file].parent) + anchor
    kind = "tree" if (ROOT / found).is_dir() else "blob"
    return f"{address}/{kind}/main/{found}{anchor}"


# ---- navigation ------------------------------------------------------------------------------------------------------


class Menu(NamedTuple):
    caption: str
    entries: list[tuple[str | None, str]]
    """For each entry: a title, or None for the page's own title; and a page or an address."""


def all_menus(places: Places, address: str) -> dict[PurePosixPath, list[Menu]]:
    """The menus of the start page, and of pages that have other pages below them."""
    menus = [Menu("", [("All pages", page(places[CONTENTS])), ("Source", address)])]
    below: dict[PurePosixPath, list[Menu]] = {}
    for caption, rows in sections(read(CONTENTS)):
        menus.append(Menu(caption, []))
        above = CONTENTS
        for row in rows:
            files = [resolved(target, CONTENTS) for _, target in row]
            entries = [(title, page(places[file])) for (title, _), file in zip(row, files, strict=True)]
            if len(row) > 1:  # these pages belong to the page of the row above
                below[above] = [Menu("", entries)]
            else:
                above = files[0]
                menus[-1].entries.extend(entries)
    menus.insert(2, Menu("API", [(None, f"/api/{name}") for name in API_PAGES]))
    menus.append(Menu("Measured and tried", others(places, [*menus, *(menu for of in below.values() for menu in of)])))
    return {START: menus, **below}


def sections(contents: str) -> Iterator[tuple[str, list[list[tuple[str, str]]]]]:
    """The tables of docs/index.md: caption, and for each row the texts and targets of the links in its first cell."""
    for section in re.split(r"^## ", contents, flags=re.MULTILINE)[1:]:
        cells = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
        rows = [re.findall(r"\[([^]]*)\]\(([^)\s]+)\)", cell) for cell in cells]
        yield section.partition("\n")[0], [row for row in rows if row]


def others(places: Places, menus: list[Menu]) -> list[tuple[str | None, str]]:
    """The pages that are in no menu: records of measurements and experiments, to which other pages link."""
    listed = {target for menu in menus for _, target in menu.entries} | {page(places[START])}
    pages = sorted(page(place) for place in places.values() if place.suffix == ".md")
    return [(None, target) for target in pages if target not in listed]


def page(place: PurePosixPath) -> str:
    return f"/{place.with_suffix('')}"


def as_toctree(menu: Menu) -> str:
    caption = [f":caption: {menu.caption}"] if menu.caption else []
    entries = [f"{title} <{target}>" if title else target for title, target in menu.entries]
    return "\n".join(["```{toctree}", ":hidden:", *caption, "", *entries, "```", ""])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
