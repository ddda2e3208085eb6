"""The links of a page in Markdown. Pages are written for a code host, where a link may lead to any file of the
repository; if a page is shown elsewhere, its links have to lead to the project's address.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
PICTURES = (".png", ".svg", ".jpg")
SITE = "https://SITE"  # what pages write for the address of the documentation's site


def with_links(text: str, changed: Callable[[str], str]) -> str:
    """The text with every link changed, except in blocks of code."""
    parts = BLOCK.split(text)
    parts[::2] = [LINK.sub(lambda link: f"]({changed(link[1])})", part) for part in parts[::2]]
    return "".join(parts)


def links(text: str) -> Iterator[str]:
    for part in BLOCK.split(text)[::2]:
        yield from LINK.findall(part)


def is_external(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def at_address(text: str, page: str, address: str, tag: str) -> str:
    """The page with links that lead to the repository's files at this address and tag."""

    def changed(target: str) -> str:
        if is_external(target) or target.startswith("#"):
            return target
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        return f"{address}/{'raw' if name.endswith(PICTURES) else 'blob'}/{tag}/{name}"

    return with_links(text, changed)
