#!/usr/bin/env python3
"""How many files name each argument of the ops: python tools/fan_out.py [-v]

A file should name an argument because it uses the argument, never only to pass it on. So the number of files is the
number of places that have to change with the argument. tests/test_rooms.py checks the numbers. The integrations, which
call public functions, are not counted; comments, messages and the ops' schemas do not count as names.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STRING = r'"(?:[^"\\]|\\.)*"'
IN_CPP = re.compile(rf"D3S_REGISTER\((?:\s*{STRING})+")
IN_PYTHON = [  # the other schemas
    f"d3s_kernels/{name}.py"
    for name in ("_dispatch/over_supports", "_lm_head/op", "_lm_head/token_logprobs", "_lm_head/topk_logprobs")
]
# Names that other code uses for other things, so that counting them says nothing.
COMMON = {
    "alpha", "bits", "eps", "high", "k", "keep", "level", "low", "ratio", "scale", "shift", "temperature", "wanted",
}  # fmt: skip
# Tensors that are no data: another form of a number, or a part of the supports.
FORMS = re.compile(r"\w+_tensor|support_(ids|offsets)")


def sources() -> list[Path]:
    files = [path for path in ROOT.glob("csrc/**/*") if path.suffix in (".h", ".cpp", ".cu")]
    files += [path for path in ROOT.glob("d3s_kernels/**/*.py") if "integrations" not in path.parts]
    return sorted(files)


def arguments() -> list[str]:
    """The ops' arguments that are numbers, flags or names, and the tensors that match FORMS."""
    schemas = [schema for path in ROOT.glob("csrc/*/*.cpp") for schema in IN_CPP.findall(path.read_text("utf-8"))]
    schemas += [string for path in IN_PYTHON for string in re.findall(STRING, (ROOT / path).read_text("utf-8"))]
    found: dict[str, None] = {}
    for kind, name in re.findall(r"\b(Tensor|SymInt|int|float|bool|str|ScalarType)[^\s,]* (\w+)", " ".join(schemas)):
        if name not in COMMON and (kind != "Tensor" or FORMS.fullmatch(name)):
            found[name] = None
    return list(found)


def names_in(path: Path) -> set[str]:
    """The identifiers of a file, and strings that consist of one name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(r"\w+", re.sub(STRING, "", re.sub(r"//.*", "", text))))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING and re.fullmatch(r'"\w+"', token.string):
            found.add(token.string[1:-1])
    return found


def files_that_name() -> dict[str, list[str]]:
    """For each argument, the files that name it."""
    names = {str(path.relative_to(ROOT)): names_in(path) for path in sources()}
    return {argument: [file for file, found in names.items() if argument in found] for argument in arguments()}


def main() -> None:
    for argument, files in sorted(files_that_name().items(), key=lambda item: -len(item[1])):
        print(f"{len(files):3} {argument}", *(files if "-v" in sys.argv else ()))


if __name__ == "__main__":
    main()
