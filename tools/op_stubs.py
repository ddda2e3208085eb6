#!/usr/bin/env python3
"""Writes d3s_kernels/_dispatch/ops.pyi: a typed function for each op, from the schemas of csrc/library.cpp.

Type checkers and editors read it, so that a call of an op is checked and leads to its signature.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

STUB = Path(__file__).resolve().parents[1] / "d3s_kernels" / "_dispatch" / "ops.pyi"
HEAD = '''"""Made by tools/op_stubs.py from csrc/library.cpp, which has the same lines with what they mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

def check(op: str, *arguments: object) -> None: ...
'''


def type_of(value: Any) -> str:
    """The Python type of an argument or result."""
    name = str(value.real_type).replace("ScalarType", "torch.dtype").replace("List[", "Sequence[")
    return re.sub(r"^Optional\[(.*)\]$", r"\1 | None", name)


def signature(op: str, schema: Any) -> str:
    arguments = [
        f"{argument.name}: {type_of(argument)}" + " = ..." * argument.has_default_value()
        for argument in schema.arguments
    ]
    results = [type_of(result) for result in schema.returns]
    returned = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]" if results else "None"
    line = f"def {op}({', '.join(arguments)}) -> {returned}: ..."
    if len(line) > 120:
        line = "\n    ".join([f"def {op}(", *(f"{argument}," for argument in arguments)]) + f"\n) -> {returned}: ..."
    return f"{line}\n"


def stub() -> str:
    from d3s_kernels._dispatch.libraries import registered, schema_of

    return HEAD + "".join(signature(op, schema_of(op)) for op in registered())


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
