"""Reads machine code: the resources that a kernel of the CUDA library uses, and the instructions of its loops."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


def cuobjdump() -> str | None:
    """The cuobjdump of the CUDA toolkit, of the package nvidia-cuda-cuobjdump, or of Triton."""
    packaged = [
        str(tool)
        for folder in map(Path, sys.path)
        for tool in (folder / "nvidia" / "cu13" / "bin" / "cuobjdump", folder / "triton/backends/nvidia/bin/cuobjdump")
        if tool.exists()
    ]
    return shutil.which("cuobjdump") or next(iter(packaged), None)


class Instruction(NamedTuple):
    address: int
    predicated: bool
    opcode: str
    target: int | None  # the address that a branch jumps to


class Resources(NamedTuple):
    registers: int
    stack: int
    local: int


def _run(library: Path, *options: str) -> str:
    tool = cuobjdump()
    assert tool is not None
    # cuobjdump finds nvdisasm beside itself
    return subprocess.run([tool, *options, str(library)], check=True, capture_output=True, text=True).stdout


@lru_cache
def resources(library: Path, architecture: str) -> dict[str, Resources]:
    """The resources of every kernel, by mangled name."""
    text = _run(library, "-arch", architecture, "-res-usage")
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {name: Resources(*map(int, numbers)) for name, *numbers in found}


@lru_cache
def kernels(library: Path, architecture: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel, by mangled name."""
    functions: dict[str, list[Instruction]] = {}
    line_of = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
    for line in _run(library, "-arch", architecture, "-sass").splitlines():
        if "Function :" in line:
            functions[line.split(":")[1].strip()] = []
        elif found := line_of.match(line):
            address, predicate, opcode, operands = found.groups()
            target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
            instruction = Instruction(
                int(address, 16), bool(predicate), opcode, int(target.group(1), 16) if target else None
            )
            functions[next(reversed(functions))].append(instruction)
    return functions


def loops(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """For each backward branch, yields the instructions from its target up to the branch."""
    for end, instruction in enumerate(code):
        if instruction.target is not None and instruction.target < instruction.address:
            begin = next(i for i, other in enumerate(code) if other.address == instruction.target)
            yield code[begin : end + 1]


def shortest_way(loop: list[Instruction]) -> list[Instruction]:
    """The path from a loop's start to its end with the fewest instructions, which runs in the common case."""
    place = {instruction.address: i for i, instruction in enumerate(loop)}
    ways: list[list[Instruction] | None] = [None] * len(loop)
    ways[0] = []
    for i, instruction in enumerate(loop[:-1]):
        way = ways[i]
        if way is None:
            continue
        jumps = instruction.target is not None and instruction.target in place
        nexts = [i + 1] if instruction.target is None or instruction.predicated else []
        nexts += [place[instruction.target]] if jumps and instruction.target is not None else []
        for other in nexts:
            known = ways[other] if other > i else []
            if known is None or (other > i and len(known) > len(way) + 1):
                ways[other] = [*way, instruction]
    last = ways[-1]
    assert last is not None, "no way through the loop"
    return [*last, loop[-1]]
