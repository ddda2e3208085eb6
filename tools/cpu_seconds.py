#!/usr/bin/env python3
"""Runs a command and fails if it took far more CPU-seconds than its bound.

    python3 tools/cpu_seconds.py 260 make test

CPU-seconds are user and system time of the command and its children; unlike wall time, they hardly depend on other
programs. Machines differ in speed by a factor of two. So a fixed piece of work is timed before and after the command.
Its time converts the command's CPU-seconds to CPU-seconds of the machine on which the bounds were set. More than
``SLACK`` times the bound is a failure. The slack allows for differences between machines that the piece of work does
not show.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import zlib

SLACK = 1.6
PIECES = 7  # the number of pieces of work before the command, and also after it
PIECE = 0.150  # CPU-seconds of a piece on the machine of the bounds: an AMD EPYC (Zen 4) of two cores, with Python 3.11


def piece_of_work() -> float:
    """The CPU-seconds of a fixed piece of work: typical work of a Python program, and a loop in C."""
    began = time.process_time()
    rows = [{"name": f"row {i}", "values": [i * j % 97 for j in range(12)]} for i in range(24_000)]
    rows.sort(key=lambda row: (sum(row["values"]), row["name"]))  # type: ignore[arg-type]
    text = json.dumps(rows).encode()
    assert json.loads(zlib.decompress(zlib.compress(text, 6))) == rows
    return time.process_time() - began


def median_piece() -> float:
    return sorted(piece_of_work() for _ in range(PIECES))[PIECES // 2]


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(what: str, used: float, piece: float, bound: float) -> tuple[bool, str]:
    """Whether ``used`` CPU-seconds are within the bound's slack, and the line that says so."""
    slower = piece / PIECE
    figure = used / slower
    line = (
        f"{what}: {used:.0f} CPU-seconds. This machine takes {slower:.2f} times as long as that of the bounds, on "
        f"which they would be {figure:.0f}: bound {bound:.0f}, failure above {SLACK * bound:.0f}."
    )
    return figure <= SLACK * bound, line


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        raise SystemExit(__doc__)
    bound, command = float(arguments[0]), arguments[1:]
    piece, used = median_piece(), children()
    status = subprocess.run(command, check=False).returncode
    used = children() - used
    within, line = verdict(" ".join(command), used, (piece + median_piece()) / 2, bound)
    print(line, flush=True)
    if status == 0 and not within:
        print(f"{' '.join(command)}: takes too many CPU-seconds.", file=sys.stderr)
        return 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
