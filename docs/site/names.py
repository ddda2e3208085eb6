"""Names of d3s_kernels in code and docstrings, for references.py. It needs no Sphinx."""

from __future__ import annotations

import re

# Types of other packages, and names for sets of types or strings, which the docstrings list.
ELSEWHERE = (
    r"(torch|collections|os|verl)\..*"
    r"|(.*\.)?(Placement|TokenScope|Shape|KeptOrAll|TokenRule|RolloutRule|Scope|Scale|LabelOutside|Group|Array)"
    r"|(.*\.)?(TrustRule|OffPolicyRule|HeadArguments|LogitsDtype)"
)
PREFIXED = re.compile(r"\bd3s(?:_kernels)?\.([\w.]+)")


def is_elsewhere(name: str) -> bool:
    return re.fullmatch(ELSEWHERE, name) is not None


def short_name(name: str) -> str:
    """The name from its class on, or without its modules if it is of no class."""
    parts = name.split(".")
    of_class = [i for i, part in enumerate(parts) if part[:1].isupper()]
    return ".".join(parts[of_class[0] if of_class else -1 :])


def name_in(code: str) -> str | None:
    """The name that code on a page calls, or consists of, and that may be one of the API.

    A word alone may be one only if it is none of everyday language, such as "entropy".
    """
    if prefixed := PREFIXED.search(code):
        return short_name(prefixed[1])
    alone = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", code, re.DOTALL)
    if alone and (alone[2] or re.search("[A-Z_]", alone[1])):
        return alone[1]
    return None


def without_types(what: str, lines: list[str]) -> list[str]:
    """The docstring, so that napoleon takes no words before a colon for a type: the annotations have the types.

    It looks at the first line of what is returned, which here becomes a field that it leaves alone; and at the first
    line of an attribute, which here becomes an escaped end of line.
    """
    described = [":returns:" if line == "Returns:" else line for line in lines]
    return ["\\", *described] if what in ("attribute", "data", "property") else described
