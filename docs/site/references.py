"""An extension of Sphinx: names of d3s_kernels become links to their description in the API.

In docstrings, a name may stand without its module or with the module that defines it. On the pages, code such as
``d3s.select_tokens(...)`` becomes a link.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from names import is_elsewhere, name_in, short_name, without_types
from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", change_docstring, priority=400)  # before napoleon, which has 500
    app.connect("missing-reference", find)
    app.connect("doctree-resolved", link_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def change_docstring(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    lines[:] = without_types(what, lines)


def documented(env: BuildEnvironment) -> dict[str, tuple[str, ObjectEntry]]:
    objects = env.get_domain("py").objects  # type: ignore[attr-defined]
    return {short_name(name): (name, entry) for name, entry in objects.items() if entry.objtype != "attribute"}


def find(app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.TextElement) -> nodes.Node | None:
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    if is_elsewhere(target):
        return nodes.Text(short_name(target))
    return reference(app, node["refdoc"], short_name(target), content)


def link_code(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Makes links of the names of pages, such as ``docs/trl.md``, and on the guides of the names of the API."""
    for code in list(tree.findall(nodes.literal)):
        if isinstance(code.parent, (nodes.reference, nodes.title)):
            continue
        text, link = code.astext(), None
        named = re.fullmatch(r"docs/([\w-]+)\.md", text)
        if named and named[1] in app.env.all_docs:
            link = make_refnode(app.builder, page, named[1], None, code.deepcopy())
        elif not page.startswith("api/") and (name := name_in(text)):
            link = reference(app, page, name, code.deepcopy())
        if link:
            code.replace_self(link)


def reference(app: Sphinx, page: str, name: str, content: nodes.TextElement) -> nodes.reference | None:
    full, entry = documented(app.env).get(name, ("", None))
    if entry is None:
        return None
    return make_refnode(app.builder, page, entry.docname, entry.node_id, content, full)
