"""The rooms of the package: each says in its first paragraph what it imports, and rooms import downwards only.

A room is a folder or a file of ``d3s_kernels``. Every import counts, also inside a function or for types only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import fan_out

PACKAGE = Path(__file__).parents[1] / "d3s_kernels"
MOST_ROOMS, MOST_FLOORS, MOST_FILES_AT_THE_TOP = 22, 10, 18
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["d3s_kernels", *package[: len(package) + 1 - node.level]] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "d3s_kernels" and "_build_info" not in name:
                inside = name.removeprefix("d3s_kernels").lstrip(".")
                yield inside if inside in MODULES else inside.rpartition(".")[0]


def room_of(module: str) -> str:
    return module.partition(".")[0]


ROOMS = sorted({room_of(module) for module in MODULES if module})


def allowed_in(room: str) -> set[str]:
    """The rooms that the first paragraph of a room's docstring names after "Imports"."""
    text = ast.get_docstring(ast.parse(MODULES[room].read_text(encoding="utf-8")))
    sentence = re.search(r"Imports (nothing|``.*``)\.$", text.partition("\n\n")[0].replace("\n", " "))
    assert sentence, f"{room}: the first paragraph of its docstring ends with what it imports"
    return set(re.findall(r"``(\w+)``", sentence[1]))


def test_few_rooms_on_few_floors() -> None:
    """TopologicalSorter refuses a circle, and so an import upwards."""
    imports = {room: allowed_in(room) for room in ROOMS}
    floors: dict[str, int] = {}
    for room in TopologicalSorter(imports).static_order():
        floors[room] = 1 + max((floors[below] for below in imports[room]), default=0)
    assert floors.keys() == set(ROOMS)
    assert len(ROOMS) <= MOST_ROOMS
    assert max(floors.values()) <= MOST_FLOORS
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_FILES_AT_THE_TOP


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_says(room: str) -> None:
    """It imports all of them: a docstring that allows more than is used would hide the next import."""
    found = {
        (room_of(name), str(path.relative_to(PACKAGE)))
        for module, path in MODULES.items()
        if room_of(module) == room and module
        for name in imported(path)
        if room_of(name) != room
    }
    allowed = allowed_in(room)
    wrong = sorted(f"{file} imports {other}" for other, file in found if other not in allowed and other)
    # only __main__, which is started from outside, may import the whole package
    wrong += sorted(f"{file} imports d3s_kernels" for other, file in found if not other and room != "__main__")
    assert not wrong
    assert allowed == {other for other, _ in found if other}


def test_contributing_names_files_that_are_there() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"(?:csrc|d3s_kernels|tests|tools|docs|_[a-z_]+)/[\w/.]+\.(?:py|cpp|cu|h|md)", text)
    assert len(named) > 30
    missing = [name for name in named if not any((folder / name).exists() for folder in (PACKAGE.parent, PACKAGE))]
    assert not missing


def test_no_two_files_import_each_other() -> None:
    graph = {name: {other for other in imported(path) if other != name} for name, path in MODULES.items() if name}
    for room, files in graph.items():  # a room's __init__ imports its files, and they do not import it
        files.discard(room_of(room))
    TopologicalSorter({name: files - {""} for name, files in graph.items()}).prepare()


# ---- arguments -------------------------------------------------------------------------------------------------------

# The arguments that more than ten files use. Two sets of kernels read drop_zeros: those of one process and those of the
# steps across ranks. The others are in two schemas, and several public functions have them.
MORE_FILES = {
    "drop_zeros": 15,
    "logit_softcap": 13,  # as all options of the LM head, each public function of the head takes these two
    "logits_dtype": 13,
    "max_dense_rows": 12,
}


def test_a_file_names_an_argument_because_it_uses_it() -> None:
    """What is only passed on travels in an object: d3s_kernels/_arguments/bundles.py, csrc/ops/*_argument*.h."""
    files = fan_out.files_that_name()
    assert len(files) > 20
    assert not MORE_FILES.keys() - files.keys()
    for argument, named in files.items():
        most = MORE_FILES.get(argument, 10)
        assert len(named) <= most, f"{argument} is named by {len(named)} files, and may be by {most}: {named}"
        assert argument not in MORE_FILES or len(named) > 10, f"{argument} needs no bound of its own"
