"""What an integration assumes about a trainer: tables of it, and the comparison with the trainer's source.

The trainer is read and not imported. So the check runs where the trainer's own dependencies are missing, such as
Megatron on a machine without a GPU, and it costs milliseconds.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["takes", "calls", "defines", "reads"]
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Assumption(NamedTuple):
    """One line of a trainer's table.

    Args:
        needed_by: the functions of ours that rely on it, separated by spaces.
        place: a module, or ``module:name`` for a function, class or method in it. If newer versions have moved it, both
            places with " or " between them; the first that exists counts.
        kind: "takes": a function with these parameters, in order. "calls": it calls exactly this. "defines": a class or
            module has these names. "reads": these names, fields or keys of dictionaries occur in it.
        expected: what the kind says; names are separated by spaces.
        why: what it is for.
    """

    needed_by: str
    place: str
    kind: Kind
    expected: str
    why: str

    def __str__(self) -> str:
        return f"{self.place} {self.kind} {self.expected}"


class Table(NamedTuple):
    """All that is assumed about a trainer, and the version in which it was read."""

    package: str
    repository: str
    commit: str
    date: str
    assumptions: tuple[Assumption, ...]


def is_installed(place: str) -> bool:
    """Whether the package of a dotted name is installed; nothing is imported."""
    return bool(_folders(place.split(".")[0]))


def difference(assumption: Assumption) -> str | None:
    """What was found in the trainer in place of what is assumed; None where the assumption holds."""
    node = next(filter(None, map(_find, assumption.place.split(" or "))), None)
    if node is None:
        return "no such name"
    if assumption.kind == "takes":
        found = _parameters(node)
        return None if found == assumption.expected else f"it takes {found}"
    if assumption.kind == "calls":
        calls = [ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Call)]
        if assumption.expected in calls:
            return None
        name = assumption.expected.partition("(")[0]
        return ", ".join(call for call in calls if call.startswith(f"{name}(")) or f"no call of {name}"
    names = set(_defined(node) if assumption.kind == "defines" else _read(node))
    missing = [name for name in assumption.expected.split() if name not in names]
    return f"no {', '.join(missing)}" if missing else None


@cache
def require(table: Table, hook: str) -> None:
    """Compares the trainer with what ``hook`` relies on, at its first call.

    Raises:
        RuntimeError: something differs; the message names all of it.
    """
    needed = [assumption for assumption in table.assumptions if hook in assumption.needed_by.split()]
    found = [(assumption, difference(assumption)) for assumption in needed]
    wrong = [f"{assumption}, for {assumption.why}: found {what}" for assumption, what in found if what is not None]
    if wrong:
        raise RuntimeError(
            f"{hook}: this {table.package} is not as {table.repository} was at {table.commit}. "
            f"{'; '.join(wrong)}. All of it: python -m d3s_kernels.integrations.check {table.package}"
        )


@cache
def load(place: str) -> Any:
    """The object at the first place that exists, imported. Later calls touch no file."""
    module, _, name = next(one for one in place.split(" or ") if _find(one) is not None).partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _find(place: str) -> ast.AST | None:
    """The module, class or function at a place, parsed."""
    module, _, name = place.partition(":")
    package, *parts = module.split(".")
    paths = [folder.joinpath(*parts) for folder in _folders(package)]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return _inside(_parsed(files[0]), name.split(".") if name else []) if files else None


def _inside(node: ast.AST, names: list[str]) -> ast.AST | None:
    for name in names:
        inner = (part for part in ast.iter_child_nodes(node) if isinstance(part, _SCOPES[1:]) and part.name == name)
        found = next(inner, None)
        if found is None:
            return None
        node = found
    return node


def _parameters(node: ast.AST) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "nothing: it is no function"
    return f"({ast.unparse(_without_types(node.args))})"


def _without_types(given: ast.arguments) -> ast.arguments:
    """The parameters without annotations and defaults."""

    def plain(parameter: ast.arg | None) -> ast.arg | None:
        return None if parameter is None else ast.arg(parameter.arg)

    positional = [ast.arg(parameter.arg) for parameter in (*given.posonlyargs, *given.args)]
    only_named = [ast.arg(parameter.arg) for parameter in given.kwonlyargs]
    return ast.arguments(
        [], positional, plain(given.vararg), only_named, [None] * len(only_named), plain(given.kwarg), []
    )


def _defined(node: ast.AST) -> Iterator[str]:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, _SCOPES[1:]):
            yield part.name
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _read(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
