#!/usr/bin/env python3
"""How many files name each argument of the ops: python tools/fan_out.py [-v]

A file should name an argument because it uses the argument, never only to pass it on. So the number of files is the
number of places that have to change with the argument. tests/test_rooms.py checks the numbers. The integrations, which
call public functions, are not counted; comments and messages do not count as names.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = ("csrc/library.cpp", "d3s_kernels/_dispatch/over_supports.py", "d3s_kernels/_lm_head/op.py")
# Names that other code uses for other things, so that counting them says nothing.
COMMON = {
    "alpha", "bits", "eps", "high", "k", "keep", "level", "low", "ratio", "scale", "shift", "temperature", "wanted",
}  # fmt: skip
# Tensors that are no data: another form of a number, or a part of a sampling mask.
FORMS = re.compile(r"\w+_tensor|support_(ids|offsets)")


def arguments() -> list[str]:
    """The ops' arguments that are numbers, flags or names, and the tensors that match FORMS."""
    found: dict[str, None] = {}
    for path in SCHEMAS:
        text = " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', (ROOT / path).read_text(encoding="utf-8")))
        for kind, name in re.findall(r"\b(Tensor|SymInt|int|float|bool|str|ScalarType)[^\s,]* (\w+)", text):
            if name not in COMMON and (kind != "Tensor" or FORMS.fullmatch(name)):
                found[name] = None
    return list(found)


def names_in(path: Path) -> set[str]:
    """The identifiers of a file, including the identifiers in schemas, and strings that consist of one name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        text = re.sub(r"//.*", "", text)
        schema = path == ROOT / SCHEMAS[0]
        return set(re.findall(r"\w+", text if schema else re.sub(r'"(?:[^"\\]|\\.)*"', "", text)))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING and re.fullmatch(r'"\w+"', token.string):
            found.add(token.string[1:-1])
        elif (
            token.type == tokenize.STRING and path in [ROOT / file for file in SCHEMAS[1:]] and "Tensor" in token.string
        ):
            found.update(re.findall(r"\w+", token.string))
    return found


def files_that_name() -> dict[str, list[str]]:
    """For each argument, the files that name it."""
    files = [path for path in ROOT.glob("csrc/**/*") if path.suffix in (".h", ".cpp", ".cu")]
    files += [path for path in ROOT.glob("d3s_kernels/**/*.py") if "integrations" not in path.parts]
    names = {str(path.relative_to(ROOT)): names_in(path) for path in sorted(files)}
    return {argument: [file for file, found in names.items() if argument in found] for argument in arguments()}


def main() -> None:
    for argument, files in sorted(files_that_name().items(), key=lambda item: -len(item[1])):
        print(f"{len(files):3} {argument}", *(files if "-v" in sys.argv else ()))


if __name__ == "__main__":
    main()
