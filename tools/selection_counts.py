#!/usr/bin/env python3
"""Counts what the selection kernels launch on an H100, without an H100: the table of docs/gpu.md.

    .venv/bin/python tools/selection_counts.py EMULATED CUDA    writes the table; a test checks it

EMULATED is the emulated library, whose launches are counted without running the kernels; CUDA is the CUDA library, for
compute capability 9.0, whose machine code has the registers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu.md"
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "binaries")]

MULTIPROCESSORS, THREADS, REGISTERS, SHARED, BLOCKS = 132, 2048, 65_536, 228 << 10, 32  # per multiprocessor, of 132

# The kernel of a launch: a part of its mangled name, for float32.
KERNELS = {
    "topk_mask": "select_segmentsILb0ELb0ELi2E",
    "topk_mask (long)": "select_segmentsILb0ELb0ELi4E",
    "topk_mask (held)": "select_heldILi8ELi8E",
    "topk_mask (first digit)": "count_first",
    "topk_mask (second digit)": "split_pieces",
    "topk_mask (third digit)": "count_last",
    "topk_mask (rest)": "finish_pieces",
    "max_variance_select (groups)": "select_groupsIfLi16E",
    "max_variance_select": "max_variance_cu.*select_segmentsIf",
    "max_variance_select (keys)": "make_entriesIf",
    "sort (runs)": "sort_runs",
    "sort (merge)": "merge_runsILb1E",
    "max_variance_select (sums)": "sum_stretches",
    "max_variance_select (splits)": "find_sorted_ends",
    "max_variance_select (mask)": "write_sorted_mask",
    "compact": "list_piece",
    "compact (flags)": "flag_piece",
}


class Launch(NamedTuple):
    name: str
    blocks: int
    threads: int
    shared: int


def calls() -> dict[str, Callable[[], object]]:
    """Selections of realistic sizes. The kernels do not run, so the values do not matter."""
    import torch

    import d3s_kernels as d3s

    scores, advantages = torch.zeros(512, 8192), torch.zeros(512)
    offsets = torch.arange(513) * 8192
    flat, rewards = scores.view(-1), torch.zeros(1 << 16)
    return {
        "topk_mask, 512 x 8,192": lambda: d3s.topk_mask(scores, 0.2),
        "topk_mask, 512 ragged segments, 4 M scores in all": lambda: d3s.topk_mask(flat, 0.2, offsets=offsets),
        "the same segments, max_segment=8192": lambda: d3s.topk_mask(flat, 0.2, offsets=offsets, max_segment=8192),
        "select_tokens, a batch of 4 M scores": lambda: d3s.select_tokens(scores, advantages, 0.2),
        "max_variance_select, 1,024 groups of 64": lambda: d3s.max_variance_select(rewards.view(-1, 64), 16),
        "max_variance_select, 64 groups of 1,024": lambda: d3s.max_variance_select(rewards.view(64, -1), 256),
        "max_variance_select, a pool of 65,536": lambda: d3s.max_variance_select(rewards, 16_384),
        "compact, a mask of 4 M": lambda: d3s.compact(flat > 0, 1 << 20),
    }


def launches() -> dict[str, list[Launch]]:
    """The launches of each call. This runs in a process of its own, in which the emulated kernels replace the CPU's."""
    import emulated_cuda  # noqa: F401

    library = ctypes.CDLL(os.environ["D3S_EMULATED_LIBRARY"])
    library.d3s_shim_launches.restype = ctypes.c_char_p
    found = {}
    for name, call in calls().items():
        library.d3s_shim_launches()
        call()
        lines = library.d3s_shim_launches().decode().splitlines()
        found[name] = [Launch(kind, *map(int, numbers)) for kind, *numbers in (line.split("\t") for line in lines)]
    return found


def counted(emulated: Path) -> dict[str, list[Launch]]:
    environment = {**os.environ, "D3S_EMULATED_LIBRARY": str(emulated), "D3S_SHIM_DRY": "1"}
    environment["D3S_SHIM_SMS"] = str(MULTIPROCESSORS)
    code = "import json, selection_counts; print(json.dumps(selection_counts.launches()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tools", env=environment, capture_output=True, text=True, check=True
    )
    return {name: [Launch(*each) for each in of] for name, of in json.loads(done.stdout.splitlines()[-1]).items()}


def resident(launch: Launch, registers: int) -> int:
    """How many blocks of this launch run on a multiprocessor at the same time."""
    warps = launch.threads // 32
    by_registers = REGISTERS // (warps * -(-registers * 32 // 256) * 256)
    by_shared = SHARED // (-(-(launch.shared + 1024) // 128) * 128)
    return min(THREADS // launch.threads, by_registers, by_shared, BLOCKS)


def lines(emulated: Path, cuda: Path) -> Iterator[str]:
    from disassembly import kernels, resources

    used, code = resources(cuda, "sm_90"), kernels(cuda, "sm_90")
    yield "| selection | launch | blocks and threads | blocks at a time, waves | registers, code |"
    yield "| --- | --- | --- | --- | --- |"
    for name, of in counted(emulated).items():
        for launch in of:
            if launch.name == "memset":
                yield f"| {name} | memset | no kernel | | |"
                continue
            (kernel,) = (key for key in used if re.search(KERNELS[launch.name], key))
            registers, together = used[kernel].registers, resident(launch, used[kernel].registers)
            waves = launch.blocks / (MULTIPROCESSORS * together)
            yield (
                f"| {name} | {launch.name} | {launch.blocks:,} blocks of {launch.threads} threads "
                f"| {together} on a multiprocessor, {waves:.2f} waves "
                f"| {registers} registers a thread, {len(code[kernel]) * 16 / 1024:.1f} KB of code |"
            )


def page(text: str, counted: list[str]) -> str:
    begin, end = "<!-- selections -->\n", "<!-- end of selections -->"
    table = "\n".join(counted)
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{table}\n\n{end}", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("emulated", type=Path)
    parser.add_argument("cuda", type=Path)
    given = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text, list(lines(given.emulated.resolve(), given.cuda.resolve()))), encoding="utf-8")


if __name__ == "__main__":
    main()
